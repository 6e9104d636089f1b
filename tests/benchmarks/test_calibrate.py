"""`seqmesh bench calibrate`: micro-batches are counted and run as in training, figures follow from the timings."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqmesh.benchmarks import calibrate
from seqmesh.benchmarks.calibrate import QUICK, Job, MicroBatch, Timings
from seqmesh.benchmarks.calibrate_rank import measure
from seqmesh.loader.cost_file import read_cost
from seqmesh.packer.fit import Seconds, predict
from seqmesh.tools import bench
from seqmesh.trainer.parallel import Ranks
from tests.ranks import run_ranks

TRUE = Seconds(fixed=1e-3, linear=1e-4, quadratic=1e-7, row_near=2e-4)
SECONDS_PER_BYTE = 6e-8  # a row of the quick model has 3,072 bytes: as many seconds
NAMES = ("fit", "fit_rings", "held_out", "held_out_rings")  # of figures
MODEL = {"vocab_size": 16, "width": 8, "layers": 1, "heads": 2, "kv_heads": 1}


def true_timings(job: Job, ranks: int, true: Seconds = TRUE) -> Timings:
    """What a machine with these terms would answer."""
    held = {each.name: calibrate.sample_of(each, 1.0, ranks) for each in job.batches}
    return Timings(
        device="cpu",
        batches={name: [float(predict(true, [sample])[0])] * 3 for name, sample in held.items()},
        messages={size: [1e-5 + SECONDS_PER_BYTE * size] * 3 for size in job.messages},
    )


def test_the_first_rank_holds_the_early_and_the_last_chunk() -> None:
    sample = calibrate.sample_of(MicroBatch(name="", whole=(3, 4), rings=(8,)), 2.0, 2)
    assert (sample.tokens, sample.pairs, sample.rows_near) == (3 + 4 + 4, 6 + 10 + (1 + 2 + 7 + 8), 4)
    assert sample.seconds == 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("size", [QUICK, calibrate.FULL])
def test_micro_batches_have_names_of_their_own_and_rings_where_ranks_do(ranks: int, size: calibrate.Size) -> None:
    batches = [*calibrate.fitted_batches(size, ranks), *calibrate.held_out_batches(size, ranks)]
    assert len({batch.name for batch in batches}) == len(batches)
    assert len({(batch.whole, batch.rings) for batch in batches}) == len(batches)
    assert any(batch.rings for batch in batches) == (ranks > 1)


def test_the_machines_terms_are_found_written_and_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "time_job", true_timings)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    results = calibrate.run(quick=True, cost_path=tmp_path / "cost.json")
    values = {each.candidate: each.value for each in results.rows if each.case == "terms"}
    assert values["linear"] == pytest.approx(100)
    assert values["quadratic"] == pytest.approx(100)
    assert values["row"] == values["row, shown by rings"] == pytest.approx(200)
    assert values["row, said by messages"] == pytest.approx(3072 * 0.06)
    assert values["ring, beyond the model"] == pytest.approx(0, abs=1e-6)
    figures = {each.figure: each.value for each in results.ratios}
    names = {f"{name}_{which}_error" for name in NAMES for which in ("median", "worst")}
    assert set(figures) == {*names, "rings_vs_messages"}
    assert max(figures[name] or 0 for name in names) < 1e-6
    written = json.loads((tmp_path / "cost.json").read_text())
    assert written["environment"]["model"]["width"] == QUICK.width
    assert written["environment"]["row"] == "rings"
    cost = read_cost(tmp_path / "cost.json")
    assert cost.linear * written["unit_seconds"] == pytest.approx(1e-4, rel=1e-3)
    assert cost.row_far == cost.row_near > 0


@pytest.mark.parametrize("shown", [0.0, 1e-3])
def test_messages_tell_a_rows_term_where_rings_show_none_or_far_more(shown: float) -> None:
    job = Job(model=MODEL, batches=calibrate.fitted_batches(QUICK, 2), messages=calibrate.MESSAGES, repeats=1)
    timings = true_timings(job, 2, replace(TRUE, row_near=shown))
    samples = [calibrate.sample_of(each, timings.batches[each.name][0], 2) for each in job.batches]
    shape = calibrate.shape_of(MODEL)
    fit, links = calibrate.fit_terms(samples, timings, shape)
    assert links.used == "messages"
    assert links.shown == pytest.approx(shown)
    assert (links.beyond > 1e-9) == (shown > 0)
    assert fit.seconds.row_near == fit.seconds.row_far == pytest.approx(shape.bytes_per_row * SECONDS_PER_BYTE)


def test_other_work_on_the_machine_does_not_move_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One undisturbed turn is enough for each micro-batch."""

    def disturbed(job: Job, ranks: int) -> Timings:
        timings = true_timings(job, ranks)
        slower = {name: [seconds[0] * 2, seconds[0], seconds[0] * 3] for name, seconds in timings.batches.items()}
        return replace(timings, batches=slower)

    monkeypatch.setattr(calibrate, "time_job", disturbed)
    figures = {each.figure: each.value for each in calibrate.run(quick=True).ratios}
    assert max(figures["fit_worst_error"] or 0, figures["held_out_worst_error"] or 0) < 1e-6


def test_one_rank_has_neither_rings_nor_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "time_job", true_timings)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0})
    results = calibrate.run(quick=True)
    assert {each.candidate: each.value for each in results.rows}["row"] == 0
    assert "rings_vs_messages" not in {each.figure for each in results.ratios}


def measured(ranks: Ranks, job: Job) -> Timings:
    return measure(job, ranks)


def test_ranks_run_and_time_what_they_are_asked() -> None:
    batches = (MicroBatch(name="whole", whole=(5, 3)), MicroBatch(name="both", whole=(2,), rings=(9, 4)))
    job = Job(model=MODEL, batches=batches, messages=(64,), repeats=2)
    for timings in run_ranks(measured, 2, job):
        assert {name: len(seconds) for name, seconds in timings.batches.items()} == {"whole": 2, "both": 2}
        assert len(timings.messages[64]) == 2
        assert np.array([*timings.batches.values(), *timings.messages.values()]).min() > 0


def test_no_other_benchmark_writes_a_cost_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a cost file is written by calibrate alone, not by rings"):
        bench.run(name="rings", quick=True, cost_path=tmp_path / "cost.json")
