import time
from pathlib import Path
from unittest.mock import patch

from seqmesh.trainer.monitor import JsonLines, Pace, StepClock, clock_time, make_record, read_steps, step_line
from seqmesh.trainer.step import StepResult

RESULT = StepResult(loss=2.5, grad_norm=0.5, fill=0.75, rows=200, layer_pairs=0, lr=1e-3, updated=True)


def test_phases_add_up_inside_the_step() -> None:
    clock = StepClock()
    for _ in range(2):
        with clock.phase("data"):
            time.sleep(0.002)
    with clock.phase("compute"):
        time.sleep(0.001)
    assert clock.seconds["data"] >= 0.004
    assert sum(clock.seconds.values()) <= clock.total
    clock.restart()
    assert clock.seconds == {}


def test_a_phase_inside_another_interrupts_it() -> None:
    """As the wait for data does, where batches are taken when they are needed."""
    with patch("time.perf_counter", side_effect=[0.0, 1.0, 3.0, 7.0, 15.0, 31.0]):
        clock = StepClock()
        with clock.phase("compute"):
            with clock.phase("data"):
                assert clock.doing == "data"
            assert clock.doing == "compute"
        assert clock.doing == ""
        assert clock.seconds == {"compute": 2.0 + 8.0, "data": 4.0}
        assert clock.total == 31.0


def test_a_step_reads_back_and_the_last_of_two_counts(tmp_path: Path) -> None:
    clock = StepClock()
    record = make_record(RESULT, clock, step=1, epoch=0, tokens=100, rings=2, ring_bytes=64, imbalance=1.0)
    for _ in range(2):  # a second start appends
        log = JsonLines(tmp_path / "log")
        log.write(record)
        log.write({"step": 2, "loss": 1.0})
        log.close()
    log = JsonLines(tmp_path / "log")
    log.write({"step": 2, "loss": 0.5})
    log.close()
    steps = read_steps(tmp_path / "log")
    assert list(steps) == [1, 2]
    assert steps[2]["loss"] == 0.5
    assert steps[1]["tokens_per_second"] == record.tokens_per_second


def test_a_line_that_a_kill_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"step": 1}\n{"step": 2, "lo')
    assert list(read_steps(tmp_path / "log")) == [1]
    log = JsonLines(tmp_path / "log")
    log.write({"step": 2})
    log.close()
    assert list(read_steps(tmp_path / "log")) == [1, 2]


def test_the_line_for_people_says_it_all() -> None:
    record = make_record(
        RESULT, StepClock(), step=3, epoch=0, tokens=100, rings=2, ring_bytes=64, imbalance=1.25, memory=3 << 29
    )
    line = step_line(record, 120, 61.0)
    for part in (
        "step   3/120",
        "loss  2.500",
        "memory 1.50 GiB",
        "fill  75.0%",
        "padding 50.0%",
        "rings  2",
        "imbalance 1.250",
        "data wait  0.0%",
        "ETA 1:01",
    ):
        assert part in line


def test_a_span_costs_less_than_a_microsecond() -> None:
    clock, batches = StepClock(), []
    for _ in range(200):  # the quickest of many: others use this machine, too
        begin = time.perf_counter()
        for _ in range(50):
            with clock.phase("data"):
                pass
        batches.append(time.perf_counter() - begin)
    assert len(clock.spans) == 10_000
    assert min(batches) / 50 < 1e-6


def test_the_clock_says_what_is_being_done() -> None:
    clock = StepClock()
    with clock.phase("reduce"):
        assert clock.doing == "reduce"
    assert clock.doing == ""


def test_the_first_step_does_not_count_as_soon_as_there_is_another() -> None:
    pace = Pace()
    pace.add(100.0)
    assert pace.mean == pace.median == 100
    for seconds in (1.0, 2.0, 6.0):
        pace.add(seconds)
    assert (pace.mean, pace.median) == (3, 2)


def test_hours_are_shown_where_there_are_any() -> None:
    assert [clock_time(seconds) for seconds in (0.4, 61, 7384)] == ["0:00", "1:01", "2:03:04"]
