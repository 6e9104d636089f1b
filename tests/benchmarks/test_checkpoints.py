"""The checkpoint benchmark on a small scale: everything is timed, bytes are counted, ratios are those of their rows."""

from pathlib import Path

import pytest

from seqmesh.benchmarks.checkpoint_rank import measure
from seqmesh.benchmarks.checkpoints import ALONE, ASYNC, BESIDE, LOAD, ONE, SAVE, STALL, WHOLE, Answer, Job, figures
from seqmesh.trainer.parallel import Ranks
from tests.ranks import run_ranks


def both(ranks: Ranks, folder: Path) -> list[Answer]:
    """Whole tensors beside torch's own, and rows of tensors."""
    jobs = [
        Job(folder=str(folder / str(spread)), size=1 << 20, spread=spread, repeats=1, products=1, peers=not spread)
        for spread in (False, True)
    ]
    return [measure(job, ranks) for job in jobs]


def test_ranks_time_and_count(tmp_path: Path) -> None:
    whole, spread = run_ranks(both, 2, tmp_path)[0]
    ours = {ONE, STALL, WHOLE, ALONE, BESIDE, LOAD}
    assert whole.seconds.keys() == ours | {SAVE, ASYNC}
    assert spread.seconds.keys() == ours
    for answer in (whole, spread):
        assert sum(answer.read) == answer.size  # nothing is read twice
        assert max(answer.read) < 0.6 * answer.size
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in answer.seconds.values())
        assert answer.seconds[STALL] < answer.seconds[WHOLE]
    assert len(list((tmp_path / "False").glob("step-*"))) == 1


def test_figures_are_ratios_of_rows() -> None:
    seconds = {
        ONE: [2.0],
        STALL: [0.1],
        WHOLE: [2.2],
        ALONE: [1.0],
        BESIDE: [1.1],
        LOAD: [1.0],
        ASYNC: [0.4],
        SAVE: [4.0],
    }
    results = figures("case", Answer(seconds=seconds, size=30, read=[10, 20]))
    found = {each.figure: each.value for each in results.ratios}
    assert found["checkpoint_stall"] == pytest.approx(0.05)
    assert found["stall_against_torch"] == pytest.approx(0.25)
    assert found["one_stage_against_torch"] == pytest.approx(0.5)
    rows = {row.candidate: row for row in results.rows}
    assert rows[ONE].value == 2_000
    assert rows[LOAD].counts == {"bytes": 30, "read_most": 20, "read_all": 30}
