"""How `seqmesh bench loader` uses the loader and what it is measured beside: `USES`, and the turns of each.

A turn lets all ranks read the whole set at the same time and says what that took, in all of them and in the loader
process that serves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seqmesh.benchmarks.harness import Row, Spread, row
from seqmesh.benchmarks.peers_reading import RATE
from seqmesh.benchmarks.processes import cpu_seconds, memory_of
from seqmesh.benchmarks.rank_jobs import COPY, EQUAL, GATHER, INLINE, PLAN, PROCESS, RAW, Job, RankProcess
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings

CAPACITY = 1 << 17  # tokens of a pack, and of the longest document
PACKS_PER_STEP = 8
START_SECONDS = 0.05  # from asking the ranks to their common begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How a candidate reads. settings, loader: keywords of `LoaderSettings` and of `Loader`, beside those that all
    have. passes: over the set, so that no reading is too short to time."""

    way: str = PROCESS
    settings: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    passes: int = 1


LOADER, COPIES, FULL = "loader", "loader, copies", "loader, full"
TOKENS_ONLY: dict[str, Any] = {"fields": ()}  # settings that leave out labels and positions
VIEWS: dict[str, Any] = {"views": True}  # keywords of `Loader` for batches that are not copied
USES = {
    COPY: Use(way=COPY, passes=8),
    RAW: Use(way=RAW, settings=TOKENS_ONLY, passes=4),
    EQUAL: Use(way=EQUAL, passes=2),
    PLAN: Use(way=PLAN, settings=TOKENS_ONLY),
    GATHER: Use(way=GATHER, settings=TOKENS_ONLY, passes=2),
    INLINE: Use(way=INLINE, settings=TOKENS_ONLY),
    LOADER: Use(settings=TOKENS_ONLY, loader=VIEWS),
    COPIES: Use(),
    FULL: Use(loader=VIEWS),
}
BESIDE_PEERS = (COPY, RAW, LOADER)
WALL, ALL_CPU, RANK_CPU = "wall", "CPU", "rank CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One candidate's turn. Seconds: on the wall from the first rank's begin to the last one's end, of CPU in all
    ranks, of CPU in the loader process and in what ranks started. megabytes: of the loader process, see `memory_of`."""

    wall: float
    rank_cpu: float
    loader_cpu: float
    tokens: int
    megabytes: dict[str, float]


SECONDS: dict[str, Callable[[Reading], float]] = {
    WALL: lambda each: each.wall,
    ALL_CPU: lambda each: each.rank_cpu + each.loader_cpu,
    RANK_CPU: lambda each: each.rank_cpu,
}
UNITS = {WALL: "Mtok/s", ALL_CPU: RATE, RANK_CPU: RATE}


def readers(
    names: Sequence[str], folder: Path, ranks: list[RankProcess], pack: int, tokens: int, stack: ExitStack
) -> dict[str, Callable[[], Reading]]:
    """Candidates; those that are served alike share a loader process."""
    loaders: dict[LoaderSettings, LoaderProcess] = {}
    found = {}
    for name in names:
        settings = settings_of(USES[name], folder, len(ranks), pack)
        if settings not in loaders:
            loaders[settings] = stack.enter_context(LoaderProcess(settings))
        found[name] = reader(USES[name], settings, ranks, loaders[settings], tokens)
    return found


def settings_of(use: Use, folder: Path, ranks: int, pack: int) -> LoaderSettings:
    return LoaderSettings(
        data=str(folder),
        tokens_per_step=PACKS_PER_STEP * pack,
        capacity=pack,
        max_document=CAPACITY,
        ranks=ranks,
        epochs=1,
        seed=0,
        **use.settings,
    )


def reader(
    use: Use, settings: LoaderSettings, ranks: list[RankProcess], loader: LoaderProcess, tokens: int
) -> Callable[[], Reading]:
    """A candidate: all ranks read the set at the same time. It raises RuntimeError if they miss a token or get one
    twice: together they read the set once."""

    def read() -> Reading:
        before, start = cpu_seconds(loader.pid), time.monotonic() + START_SECONDS
        for number, rank in enumerate(ranks):
            job = job_of(use, settings)
            rank.ask(replace(job, rank=number, endpoint=loader.endpoint, start=start))
        taken = [rank.answer() for rank in ranks]
        found = sum(each.tokens for each in taken)
        if found != use.passes * tokens:
            raise RuntimeError(f"{use.way}: {found} tokens came of {use.passes * tokens}")
        return Reading(
            wall=max(each.end for each in taken) - min(each.begin for each in taken),
            rank_cpu=sum(each.cpu for each in taken),
            loader_cpu=cpu_seconds(loader.pid) - before,
            tokens=found,
            megabytes=memory_of(loader.pid),
        )

    return read


def job_of(use: Use, settings: LoaderSettings) -> Job:
    return Job(way=use.way, settings=settings.to_json().decode(), passes=use.passes, loader=dict(use.loader))


def rate_row(case: str, name: str, kind: str, readings: list[Reading]) -> Row:
    """Million tokens per second of the kind that is asked for, which is tokens per microsecond."""
    tokens, seconds = readings[0].tokens, Spread.of([SECONDS[kind](each) for each in readings])
    return row(case, name, seconds.rate(tokens / 1e6), UNITS[kind], tokens=tokens, microseconds=1e6 * seconds.median)
