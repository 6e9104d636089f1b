"""The split of a step's time, from records like those that a job logs. No job is run here."""

import pytest

from seqmesh.benchmarks.train import split


def record(total: float, **seconds: float) -> dict[str, object]:
    return {"total": total, "seconds": seconds, "tokens": 100, "rings": 3, "tokens_per_second": 100 / total}


def test_a_step_is_split_into_its_phases() -> None:
    results = split(
        "free", [record(1.0, data=0.1, compute=0.5, reduce=0.2), record(3.0, data=0.1, compute=2.5, reduce=0.2)]
    )
    rows = {r.candidate: r for r in results.rows}
    assert rows["step"].value == 2_000
    assert rows["data"].value == pytest.approx(100)
    assert {rows[phase].unit for phase in ("step", "data", "other")} == {"ms"}
    assert rows["save"].value == 0
    assert rows["other"].value == pytest.approx(200)
    assert rows["step"].counts == {"steps": 2, "tokens": 200, "rings": 6}
    shares = {r.figure: r for r in results.ratios}
    assert shares["data_share"].value == pytest.approx(0.05)
    assert shares["data_share"].denominator == "step, free/step"
    assert set(shares) == {f"{phase}_share" for phase in ("data", "compute", "reduce", "update", "save", "other")}


def test_a_job_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        split("free", [])
