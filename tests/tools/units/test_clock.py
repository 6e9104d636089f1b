"""Progress: what is left is judged by this run alone."""

from __future__ import annotations

import pytest

from seqmesh.tools.ingest import Tally
from seqmesh.tools.units.clock import Clock


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only entry."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_what_an_earlier_run_did_and_the_start_do_not_count(at: list[float]) -> None:
    clock = Clock(1000, None, 500)
    at[0] = 107.0  # starting took long
    first = clock.progress(Tally(tokens=600), 600)
    assert (first.fraction, first.seconds, first.remaining, first.resumed_tokens) == (0.6, 7.0, None, 500)
    at[0] = 109.0
    assert clock.progress(Tally(tokens=700), 700).remaining == pytest.approx(6.0)
    at[0] = 115.0
    assert clock.progress(Tally(tokens=1000), 1000).remaining == pytest.approx(0.0)


def test_a_limit_of_tokens_may_end_it_sooner(at: list[float]) -> None:
    clock = Clock(1000, 100, 0)
    clock.progress(Tally(tokens=10), 20)
    at[0] += 3
    update = clock.progress(Tally(tokens=40), 80)
    assert update.fraction == 0.4
    assert update.remaining == pytest.approx(6.0)


def test_inputs_of_unknown_size_have_no_end(at: list[float]) -> None:
    clock = Clock(0, None, 0)
    clock.progress(Tally(), 0)
    at[0] += 3
    update = clock.progress(Tally(tokens=5), 0)
    assert (update.fraction, update.remaining) == (0.0, None)
