"""`seqmesh bench loader`: tokens from shards to torch tensors, for one rank and for two, beside a plain copy.

Ranks are processes of their own, which `rank.py` runs; with two of them one loader process serves both. Every way of
reading takes whole passes over the same set, so tokens per second compare. Three cases for each number of ranks come
out of the same runs: tokens per second of wall time, per CPU-second of all processes, and per CPU-second of the ranks
alone, which is what a training process pays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from seqmesh.benchmarks.harness import Results, Row, Spread, chosen_peers, interleave, ratio, row
from seqmesh.benchmarks.lengths import python_documents
from seqmesh.benchmarks.shards import random_shards, scratch_folder
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings

PEERS: tuple[str, ...] = ()
CAPACITY = 131_072  # tokens of a pack, and of the longest document
PACKS_PER_STEP = 8
COPY, SAME_FIELDS, GATHER, INLINE, PROCESS = "copy", "same fields", "gather", "inline", "process"
WAYS = {1: (COPY, SAME_FIELDS, GATHER, INLINE, PROCESS), 2: (COPY, SAME_FIELDS, PROCESS)}
PASSES = {
    COPY: 16,
    SAME_FIELDS: 4,
    GATHER: 2,
}  # over the set, 1 where not named: no reading should be too short to time
WALL, CPU, RANK_CPU = "wall", "CPU", "rank CPU"
UNITS = {WALL: "tokens/s", CPU: "tokens/CPU-s", RANK_CPU: "tokens/rank CPU-s"}
START_SECONDS = 0.05  # from asking the ranks to their common begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is asked: read the set of `settings` (LoaderSettings as JSON) in one `way`, `passes` times, as number
    `rank` of its ranks, beginning at `start` of the machine's monotonic clock (seconds), at which all its ranks begin.
    endpoint: of the loader process."""

    way: str
    passes: int
    settings: str
    rank: int
    endpoint: str
    start: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one job took. begin, end: seconds of the monotonic clock. cpu: CPU seconds of the rank, all threads."""

    begin: float
    end: float
    cpu: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One candidate's turn. Seconds: on the wall from the first rank's begin to the last one's end, of CPU in
    all ranks, of CPU in the loader process."""

    wall: float
    rank_cpu: float
    loader_cpu: float
    tokens: int


SECONDS: dict[str, Callable[[Reading], float]] = {
    WALL: lambda each: each.wall,
    CPU: lambda each: each.rank_cpu + each.loader_cpu,
    RANK_CPU: lambda each: each.rank_cpu,
}


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """A set that is large enough for steady figures."""
    chosen_peers(PEERS, against)
    return measure_set(1 << 25, repeats=5) if quick else measure_set(1 << 27, repeats=11)


def measure_set(tokens: int, *, repeats: int) -> Results:
    """Write a set of this many tokens and read it with one rank, then with two."""
    results = Results()
    with scratch_folder(8 * tokens) as scratch, ExitStack() as stack:
        folder = random_shards(scratch / "set", python_documents(tokens, CAPACITY))
        ranks = [stack.enter_context(RankProcess()) for _ in range(max(WAYS))]
        for count in WAYS:
            results += reading(folder, ranks[:count], tokens, repeats)
    return results


def reading(folder: Path, ranks: list[RankProcess], tokens: int, repeats: int) -> Results:
    """Every way of reading the set, by these ranks."""
    settings = LoaderSettings(
        data=str(folder),
        tokens_per_step=PACKS_PER_STEP * CAPACITY,
        capacity=CAPACITY,
        ranks=len(ranks),
        epochs=1,
        seed=0,
    )
    ways = WAYS[len(ranks)]
    with LoaderProcess(settings) as loader:
        readings = interleave({way: reader(way, settings, ranks, loader, tokens) for way in ways}, repeats)
    rows = {kind: {way: rate_row(way, len(ranks), kind, readings[way]) for way in ways} for kind in SECONDS}
    every = tuple(each for by_way in rows.values() for each in by_way.values())
    return Results(rows=every, ratios=tuple(ratio(*figure) for figure in figures(rows, len(ranks))))


def figures(rows: dict[str, dict[str, Row]], ranks: int) -> Iterator[tuple[str, Row, Row]]:
    """Name, numerator and denominator of each figure."""
    wall, cpu = rows[WALL], rows[CPU]
    yield f"loader_vs_memmap_{ranks}", wall[PROCESS], wall[COPY]
    yield f"loader_vs_same_fields_{ranks}", wall[PROCESS], wall[SAME_FIELDS]
    yield f"loader_cpu_vs_same_fields_{ranks}", cpu[PROCESS], cpu[SAME_FIELDS]
    if ranks == 1:
        yield "gather_vs_memmap", wall[GATHER], wall[COPY]
        yield "inline_vs_memmap", wall[INLINE], wall[COPY]


def rate_row(way: str, ranks: int, kind: str, readings: list[Reading]) -> Row:
    """Tokens per second of the kind that is asked for."""
    tokens = readings[0].tokens
    spread = Spread.of([SECONDS[kind](each) for each in readings]).rate(tokens)
    return row(f"{ranks} rank{'s' if ranks > 1 else ''}, {kind}", way, spread, UNITS[kind], tokens=tokens)


def reader(
    way: str, settings: LoaderSettings, ranks: list[RankProcess], loader: LoaderProcess, tokens: int
) -> Callable[[], Reading]:
    """A candidate: all ranks read the set at the same time. It raises RuntimeError if they miss a token."""
    text, passes = settings.to_json().decode(), PASSES.get(way, 1)

    def read() -> Reading:
        before, start = cpu_seconds(loader.pid), time.monotonic() + START_SECONDS
        for number, rank in enumerate(ranks):
            endpoint = loader.endpoint
            rank.ask(Job(way=way, passes=passes, settings=text, rank=number, endpoint=endpoint, start=start))
        taken = [rank.answer() for rank in ranks]
        found = sum(each.tokens for each in taken)
        if found != passes * tokens:
            raise RuntimeError(f"{way}: {found} tokens came of {passes * tokens}")
        return Reading(
            wall=max(each.end for each in taken) - min(each.begin for each in taken),
            rank_cpu=sum(each.cpu for each in taken),
            loader_cpu=cpu_seconds(loader.pid) - before,
            tokens=found,
        )

    return read


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a running process has used, all threads.

    Linux derives the number of a process's CPU clock from its pid in this way (see clock_getcpuclockid); it counts in
    nanoseconds, /proc only in hundredths of a second.
    """
    return time.clock_gettime((~pid << 3) | 2)


class RankProcess:
    """A running `seqmesh.benchmarks.rank`: ask it, then wait for its answer."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "seqmesh.benchmarks.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # ranks share the machine's cores: one thread each
        )

    def ask(self, job: Job) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Taken:
        """Raises RuntimeError where the process ended instead; it has said why on the standard error output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with exit code {self._process.wait()}")
        return Taken(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it and wait for it."""
        self._process.terminate()
        self._process.communicate()
