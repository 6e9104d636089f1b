"""Ranks that die, stop or hang are named by those that wait for them. Time is what a clock of ours says."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch forgets to export it

from seqmesh.trainer import beats
from seqmesh.trainer.beats import BEAT_SECONDS, MOST_NAMED, SILENT_SECONDS, Beats, Signs, Watch, name_ranks
from tests.stores import Counting


@dataclass
class Rank:
    """One of several in this process; `beats` asks a store that counts."""

    store: Counting
    beats: Beats
    watch: Watch
    said: list[str]


@dataclass
class Clock:
    """Seconds, and whose beats go on meanwhile."""

    now: float = 0.0
    beat: int = 0
    ranks: list[Rank] = field(default_factory=list)

    def run(self, seconds: float, without: Iterable[int] = ()) -> None:
        """Let all beat, but some, and those that have ended."""
        for _ in range(round(seconds / BEAT_SECONDS)):
            self.now += BEAT_SECONDS
            self.beat += 1
            for number, rank in enumerate(self.ranks):
                if number not in without and not rank.said:
                    rank.beats.beat(self.beat)

    def start(self, places: Iterable[str]) -> list[Rank]:
        """As many ranks as places, each of them doing one."""
        shared = HashStore()
        for place in (places := list(places)):
            watch, said = Watch(doing=lambda place=place: place), list[str]()  # type: ignore[misc]  # mypy can not infer defaults here
            store = Counting(shared)
            one = Beats(store, len(self.ranks), len(places), watch, said.append)
            self.ranks.append(Rank(store, one, watch, said))
        self.run(2 * BEAT_SECONDS)  # all are here, and the first has said so
        return self.ranks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(beats, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.run))
    return clock


def test_a_silent_rank_is_named_by_all_others_two_beats_after_it_has_been_silent_for_long(clock: Clock) -> None:
    ranks = clock.start(("step 3, reduce", "step 3, compute", "step 3, reduce"))
    clock.run(100, without=[1])
    assert all(not rank.said for rank in ranks)  # before the first step nobody is judged
    clock.run(BEAT_SECONDS)
    for rank in ranks:
        rank.watch.silence = 5.0
    clock.run(5.0, without=[1])
    assert all(not rank.said for rank in ranks)
    clock.run(2 * BEAT_SECONDS, without=[1])
    assert ranks[0].said == ["rank 0, step 3, reduce: rank 1 died or stopped: silent for 5 s (heartbeat)"]
    assert ranks[2].said == ["rank 2, step 3, reduce: rank 1 died or stopped: silent for 5 s (heartbeat)"]
    assert ranks[1].said == []


def test_the_first_is_named_by_the_others_where_it_is_silent_itself(clock: Clock) -> None:
    ranks = clock.start(["step 3, reduce"] * 3)
    for rank in ranks:
        rank.watch.silence = 5.0
    clock.run(5.0 + BEAT_SECONDS, without=[0, 1])  # of the other nobody can tell
    assert ranks[2].said == ["rank 2, step 3, reduce: rank 0 died or stopped: silent for 5 s (heartbeat)"]


def test_a_rank_that_lives_but_does_not_get_on_ends_the_step_and_shows_up_first(clock: Clock) -> None:
    ranks = clock.start(("step 3, reduce", "step 3, compute", "step 3, reduce"))
    ranks[2].watch.deadline = clock.now + 0.3
    clock.run(1.0)
    places = "rank 1: step 3, compute; ranks 0, 2: step 3, reduce"
    assert ranks[2].said == [f"rank 2, step 3, reduce: not done in time (step_timeout): {places}"]
    assert ranks[0].said == ranks[1].said == []
    ranks[0].watch.deadline = clock.now
    clock.run(1.0)
    assert ranks[0].said == [f"rank 0, step 3, reduce: not done in time (step_timeout): {places}"]


@pytest.mark.parametrize("gone", [0, 1])
def test_after_a_failed_exchange_who_is_gone_is_named_and_nobody_else(clock: Clock, gone: int) -> None:
    ranks = clock.start(["step 3, reduce"] * 4)
    assert ranks[2].beats.who_is_lost() == "no answer in time, though all ranks are alive"
    ranks[gone].said.append("dead")  # it beats no more
    assert [rank.beats.who_is_lost() for rank in ranks[2:]] == [f"rank {gone} died or stopped"] * 2


def test_what_a_rank_asks_of_the_store_does_not_grow_with_their_number(clock: Clock) -> None:
    """The first reads all ranks' words, in one request."""
    for count in (2, 40):
        clock.ranks.clear()
        ranks = clock.start(["start"] * count)
        for rank in ranks:
            rank.store.calls.clear()
        clock.run(BEAT_SECONDS)
        assert ranks[0].store.calls == {"set 0": 1, "multi_get 0": 1, "set report": 1}
        for number, rank in list(enumerate(ranks))[1:]:
            assert rank.store.calls == {f"set {number}": 1, "multi_get report": 1}


def test_reports_and_sentences_stay_short_however_many_are_lost(clock: Clock) -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(2 * MOST_NAMED)).endswith(f", {MOST_NAMED - 1} and {MOST_NAMED} more")
    ranks = clock.start(["start"] * 400)
    clock.run(9.0, without=range(2, 400))
    assert len(ranks[1].beats._store.get("report")) < 400
    ranks[1].watch.silence = 8.0
    clock.run(BEAT_SECONDS, without=range(2, 400))
    assert f", {MOST_NAMED + 1} died or stopped" in ranks[1].said[0]


def test_a_process_that_was_stopped_itself_blames_nobody_for_that_time(clock: Clock) -> None:
    signs = Signs(2, now=0.0)
    assert signs.hear(["1 a", "1 a"], now=0.5) == 0
    assert signs.hear(["2 a", "1 a"], now=1.0) == 0
    assert signs.silent(0.4, now=1.0) == [1]
    assert signs.hear(["3 a", "1 a"], now=101.0) == pytest.approx(100 - 2 * BEAT_SECONDS)
    assert signs.silent(2.0, now=101.0) == []
    assert signs.hear(["4 a", "1 a"], now=101.0 + BEAT_SECONDS / 100) == 0
    assert signs.silent(10.0, now=111.0) == [1]
    ranks = clock.start(["step 3, reduce"] * 3)
    ranks[2].watch.silence, ranks[2].watch.deadline = 5.0, clock.now + 20.0
    clock.run(100.0, without=[2])
    clock.run(3 * SILENT_SECONDS)
    assert ranks[2].said == []
    assert math.isinf(ranks[1].watch.deadline)
