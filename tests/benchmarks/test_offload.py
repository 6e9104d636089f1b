"""`seqmesh bench offload` on a model small enough to follow."""

import pytest

from seqmesh.benchmarks import offload
from seqmesh.benchmarks.offload import CANDIDATES, Size


def test_what_is_kept_and_moved_is_counted() -> None:
    layers, tokens = 4, 160
    results = offload.compare(Size(width=64, layers=layers, tokens=tokens, repeats=1))
    counts = {row.candidate: row.counts for row in results.rows if row.case == "step"}
    figures = {ratio.figure: ratio.value for ratio in results.ratios}
    assert list(counts) == list(CANDIDATES)
    whole = counts["none"]["kept"]
    assert counts["none"]["moved"] == 0
    for name, part in (("half", 0.5), ("all", 1.0)):
        assert counts[name]["kept"] + counts[name]["moved"] == whole
        assert counts[name]["moved"] == pytest.approx(whole * part * (layers - 2) / layers, rel=0.01)
    assert figures["kept_full"] == pytest.approx(1 / 15, rel=0.1)
    assert figures["kept_selective"] == pytest.approx(2 / 15, rel=0.1)
    assert figures["kept_selective_all"] == pytest.approx(1 / 15, rel=0.1)
    assert set(figures) == {f"{figure}_{name}" for figure in ("kept", "time") for name in CANDIDATES if name != "none"}
    (copies,) = offload.bandwidth(1 << 16, repeats=1).rows
    assert copies.value is not None
    assert copies.value > 1e6
