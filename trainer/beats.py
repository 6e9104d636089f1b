"""Signs of life: a thread of every rank counts on in a store that all can reach; the first looks whether the others do.

It is the one thing that finds out that a rank hangs. A process that is dead, stopped or cut off is silent; one whose
main thread waits for ever is not, but its step does not end in time. Both are told in a sentence that says which rank,
and end this process: its main thread sits in an exchange that nothing else would end before its own long time-out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch forgets to export it

BEAT_SECONDS = 0.5
SILENT_SECONDS = 2.0  # a rank that was silent for this long, when an exchange has failed, is why
MOST_NAMED = 16  # ranks in one sentence: a report stays short, however many there are
REPORT = "report"  # the store's key


def end_process(sentence: str) -> None:
    """Say it, and end without further ado."""
    sys.stdout.write(f"error: {sentence}\n")
    sys.stdout.flush()
    os._exit(1)


@dataclass(slots=True, kw_only=True)
class Watch:
    """What a rank's main thread lets its watching thread know. doing: what it does, in words. silence: seconds without
    a sign of life after which a rank is lost. deadline: on time.monotonic, when what it does has to be done."""

    doing: Callable[[], str] = lambda: "start"
    silence: float = math.inf
    deadline: float = math.inf


class Signs:
    """What was heard of every rank: its latest word, and when that came. Times are seconds on one clock."""

    def __init__(self, count: int, now: float) -> None:
        self.words = [""] * count
        self._times = [now] * count
        self._heard = now

    def hear(self, words: Sequence[str], now: float) -> float:
        """Take in the word of every rank; returns seconds in which nobody listened, as this process did not run: they
        are nobody's silence."""
        deaf = max(now - self._heard - 2 * BEAT_SECONDS, 0.0)
        news = [word != before for word, before in zip(words, self.words, strict=True)]
        self._times = [now if new else time + deaf for new, time in zip(news, self._times, strict=True)]
        self.words, self._heard = list(words), now
        return deaf

    def silent(self, seconds: float, now: float) -> list[int]:
        """Ranks that have had nothing new to say for so long."""
        return [rank for rank, time in enumerate(self._times) if now - time > seconds]

    def silence(self, rank: int, now: float) -> float:
        """Seconds."""
        return now - self._times[rank]

    def doing(self) -> str:
        """What every rank does, those together that do the same; the fewest first, as they keep the others."""
        groups: dict[str, list[int]] = {}
        for rank, word in enumerate(self.words):
            groups.setdefault(word.partition(" ")[2], []).append(rank)
        return "; ".join(f"{name_ranks(r)}: {place}" for place, r in sorted(groups.items(), key=lambda g: len(g[1])))


class Report:
    """What the first rank tells the others, as text: who has been silent since when, and what each does."""

    def __init__(self, text: str = "", heard: float = 0.0) -> None:
        _, silent, self.doing = text.split("\n") if text else ("", "", "nothing was heard of the others")
        self._silent = {int(rank): float(seconds) for rank, seconds in (e.split(":") for e in silent.split())}
        self._heard = heard

    @staticmethod
    def text(count: int, signs: Signs, now: float) -> str:
        """count: one more each time, so that the report is news."""
        silent = [f"{rank}:{signs.silence(rank, now):.2f}" for rank in signs.silent(2 * BEAT_SECONDS, now)]
        return f"{count}\n{' '.join(silent[:MOST_NAMED])}\n{signs.doing()}"

    def silent(self, seconds: float, now: float) -> list[int]:
        """Ranks that have had nothing new to say for so long."""
        return [rank for rank, so_far in self._silent.items() if so_far + now - self._heard > seconds]


class Beats:
    """This rank's count, and what is known of the others'. end: gets the sentence, in the watching thread.

    The first rank reads what every rank says, and says what it found. The others read that, and nothing else, so what
    any of them asks of the store does not grow with the number of ranks; of the first they know whether it goes on.
    """

    def __init__(
        self, store: Store, rank: int, count: int, watch: Watch, end: Callable[[str], None] = end_process
    ) -> None:
        self._store, self._rank, self._watch, self._end = store, rank, watch, end
        self._read = [str(other) for other in range(count)] if rank == 0 else [REPORT]
        self._signs = Signs(len(self._read), time.monotonic())
        self._report = Report()
        self._all_here = False
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._say(0)
        thread = threading.Thread(target=self._run, name="beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def who_is_lost(self) -> str:
        """After a failed exchange: ranks that are silent, in words."""
        time.sleep(SILENT_SECONDS + 2 * BEAT_SECONDS)  # the first has heard of it, and the others of that
        lost = self._silent(SILENT_SECONDS)
        return f"{name_ranks(lost)} died or stopped" if lost else "no answer in time, though all ranks are alive"

    def _run(self) -> None:
        with contextlib.suppress(dist.DistError):  # the store is gone: so is the job
            for count in itertools.count(1):
                if self._ended.wait(BEAT_SECONDS):
                    return
                self.beat(count)

    def beat(self, count: int) -> None:
        """What the thread does, again and again. count: one more each time."""
        self._say(count)
        self._listen(count)
        self._judge()

    def _say(self, count: int) -> None:
        self._store.set(str(self._rank), f"{count} {self._watch.doing()}")

    def _listen(self, count: int) -> None:
        # Asking for what is not there yet would wait for it.
        self._all_here = self._all_here or self._store.check(self._read)
        if not self._all_here:
            return
        words = [word.decode() for word in self._store.multi_get(self._read)]
        now, news = time.monotonic(), words != self._signs.words
        self._watch.deadline += self._signs.hear(words, now)
        if self._rank == 0:
            self._store.set(REPORT, Report.text(count, self._signs, now))
        elif news:
            self._report = Report(words[0], now)

    def _judge(self) -> None:
        watch, here = self._watch, f"rank {self._rank}, {self._watch.doing()}"
        if lost := self._silent(watch.silence):
            self._end(f"{here}: {name_ranks(lost)} died or stopped: silent for {watch.silence:g} s (heartbeat)")
        elif time.monotonic() > watch.deadline:
            doing = self._signs.doing() if self._rank == 0 else self._report.doing
            self._end(f"{here}: not done in time (step_timeout): {doing}")

    def _silent(self, seconds: float) -> list[int]:
        """Of the others, whom the first says; but the first where that says nothing itself."""
        now = time.monotonic()
        found = self._signs.silent(seconds, now)
        if self._rank > 0 and not found:
            found = self._report.silent(seconds, now)
        return [rank for rank in found if rank != self._rank]


def name_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMED:,} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"
