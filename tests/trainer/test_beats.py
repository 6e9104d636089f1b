"""Ranks that die, stop or hang are named by those that wait for them."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch forgets to export it

from seqmesh.trainer import beats
from seqmesh.trainer.beats import BEAT_SECONDS, Beats, Signs, Watch

SECONDS = 20.0


@dataclass
class Rank:
    watch: Watch
    said: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, sentence: str) -> None:
        self.said.append(sentence)
        self.ended.set()
        self.watch.silence = self.watch.deadline = float("inf")


@contextmanager
def three_ranks(places: tuple[str, str, str]) -> Iterator[tuple[list[Rank], list[ExitStack]]]:
    """Ranks of this process, and what ends each one's signs of life."""
    store, ranks, lives = HashStore(), [], []
    with ExitStack() as stack:
        for rank, place in enumerate(places):
            watch = Watch(doing=lambda place=place: place)  # type: ignore[misc]  # mypy can not infer defaults here
            ranks.append(Rank(watch))
            lives.append(stack.enter_context(ExitStack()))
            lives[-1].enter_context(Beats(store, rank, 3, watch, ranks[-1].end).running())
        yield ranks, lives


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "BEAT_SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
def test_a_silent_rank_is_named_by_the_others_as_soon_as_it_has_been_silent_for_long() -> None:
    with three_ranks(("step 3, reduce", "step 3, compute", "step 3, reduce")) as (ranks, lives):
        time.sleep(0.1)
        assert all(not rank.said for rank in ranks)  # before the first step nobody is judged
        for rank in ranks:
            rank.watch.silence = 0.5
        lives[1].close()
        began = time.monotonic()
        assert ranks[0].ended.wait(SECONDS)
        assert ranks[2].ended.wait(SECONDS)
        assert time.monotonic() - began >= 0.4
    assert ranks[0].said == ["rank 0, step 3, reduce: rank 1 died or stopped: silent for 0.5 s (heartbeat)"]
    assert ranks[2].said == ["rank 2, step 3, reduce: rank 1 died or stopped: silent for 0.5 s (heartbeat)"]
    assert ranks[1].said == []


@pytest.mark.usefixtures("quick")
def test_a_rank_that_lives_but_does_not_get_on_ends_the_step_and_shows_up_first() -> None:
    with three_ranks(("step 3, reduce", "step 3, compute", "step 3, reduce")) as (ranks, _):
        ranks[2].watch.deadline = time.monotonic() + 0.3
        assert ranks[2].ended.wait(SECONDS)
    places = "rank 1: step 3, compute; ranks 0, 2: step 3, reduce"
    assert ranks[2].said == [f"rank 2, step 3, reduce: not done in time (step_timeout): {places}"]
    assert ranks[0].said == ranks[1].said == []


def test_a_process_that_was_stopped_itself_blames_nobody_for_that_time() -> None:
    signs = Signs(2, now=0.0)
    assert signs.hear(["1 a", "1 a"], now=0.5) == 0
    assert signs.hear(["2 a", "1 a"], now=1.0) == 0
    assert signs.silent(0.4, now=1.0) == [1]
    assert signs.hear(["3 a", "1 a"], now=101.0) == pytest.approx(100 - 2 * BEAT_SECONDS)
    assert signs.silent(2.0, now=101.0) == []
    assert signs.hear(["4 a", "1 a"], now=101.0 + BEAT_SECONDS / 100) == 0
    assert signs.silent(10.0, now=111.0) == [1]
