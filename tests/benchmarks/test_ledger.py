"""What the ledger and the metrics cost: measured over real steps, and little."""

from pathlib import Path

import pytest

from seqmesh.benchmarks.ledger import compare
from tests.support import make_set, settings_for


def test_the_cost_is_of_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", [500] * 400, shard_tokens=50_000)
    settings = settings_for(data, tokens_per_step=10_000, capacity=5_000, ranks=2)
    results = compare("case", settings, tmp_path / "ledger", steps=20, repeats=2)
    serving, recording, metrics = results.rows
    assert serving.counts == {"documents": 20, "batches": 2}
    assert recording.counts["bytes"] > 20 * 24  # of a document: row, length, ring and rank
    assert serving.value is not None
    for row in (recording, metrics):
        assert row.value is not None
        assert 0 < row.value < serving.value
    assert [ratio.figure for ratio in results.ratios] == ["ledger_share", "metrics_share"]
    assert list((tmp_path / "ledger").iterdir()) == []
    with pytest.raises(ValueError, match="the data have 20 steps: 21 are to be measured"):
        compare("case", settings, tmp_path / "ledger", steps=21, repeats=1)
