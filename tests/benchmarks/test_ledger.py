"""What the ledger costs: measured over real steps, and little."""

from pathlib import Path

import pytest

from seqmesh.benchmarks.ledger import ledger_cost
from tests.support import make_set, settings_for


def test_the_cost_is_of_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", [500] * 400, shard_tokens=50_000)
    settings = settings_for(data, tokens_per_step=10_000, capacity=5_000, ranks=2)
    cost = ledger_cost(settings, tmp_path / "ledger", steps=20)
    assert cost.documents == 20
    assert cost.size > 20 * 34  # bytes of a document: row, offset, length, source, ring and rank
    assert 0 < cost.recording < cost.serving
    assert list((tmp_path / "ledger").iterdir()) == []
    with pytest.raises(ValueError, match="the data have 20 steps: 21 are to be measured"):
        ledger_cost(settings, tmp_path / "ledger", steps=21)
