"""A rank of `seqmesh bench loader`: a process that turns shards into torch tensors, in several ways, and times itself.

`python -m seqmesh.benchmarks.rank` reads one `Job` as JSON per line of its input and answers each with one line, a
`Taken`. The process stays for all jobs of a benchmark: importing and compiling happen before anything is counted.
With several ranks each reads its share of the set.

    mapped copy          the tokens of the memory-mapped shards in their order, to one buffer that is used again
    copy of equal bytes  fresh arrays of the sizes that the loader's batches have, from memory that is warm
    raw gather           documents in shuffled order by memcpy to one buffer that is used again, planned beforehand
    plan                 order and plans alone, no token is read
    gather               batches that were planned beforehand, gathered in shuffled order to one block of memory
    inline               `Loader(mode="inline")`: order, planning, gathering and conversion in this process
    process              `Loader(endpoint=...)`: the same from a loader process
    first batch          a loader process started and its first batch taken
    resume               inline, open before: from `load_state_dict` at a drawn document to the batch there
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.benchmarks.processes import cpu_of_children
from seqmesh.benchmarks.rank_jobs import COPY, EQUAL, FIRST, GATHER, INLINE, PLAN, PROCESS, RAW, RESUME, Job, Taken
from seqmesh.benchmarks.roofs import raw_gather
from seqmesh.benchmarks.shards import mapped_ids
from seqmesh.loader.batch import ARRAYS, Outline, outline, write
from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed
from seqmesh.loader.planner import Step
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import StreamState
from seqmesh.packer.lengths import Int64Array

TIMEOUT = 120.0  # seconds
WARM_PACKS = 4  # that a copy of equal bytes takes turns with: as many as a loader may have under way

# A way of reading: what must be open beforehand goes on the stack, the result gives the tokens of batch after batch.
Way = Callable[[LoaderSettings, Job, ExitStack], Iterator[int]]


def copy(settings: LoaderSettings, job: Job, _stack: ExitStack) -> Iterator[int]:
    """Plain memory-mapped copy."""
    ids = _mapped(settings.data)
    buffer = np.empty(settings.capacity, ids[0].dtype)
    for number, pack in enumerate(_packs(ids, settings.capacity)):
        if number % settings.ranks == job.rank:
            buffer[: len(pack)] = pack
            yield len(pack)


def equal(settings: LoaderSettings, job: Job, _stack: ExitStack) -> Iterator[int]:
    """Copies of as many bytes as the loader's own fields, one for each field."""
    warm, sizes = _warm(settings), _field_bytes(settings)
    for number, pack in enumerate(_packs(_mapped(settings.data), settings.capacity)):
        if number % settings.ranks == job.rank:
            for size in sizes:
                warm[number % WARM_PACKS, : int(size * len(pack))].copy()
            yield len(pack)


def raw(settings: LoaderSettings, job: Job, _stack: ExitStack) -> Iterator[int]:
    """The memcpy gather, of the same documents in the same batches as the loader's."""
    itemsize = _planned(settings)[0].shards.token_dtype.itemsize
    buffer = np.empty(settings.capacity * itemsize, np.uint8)
    for addresses, sizes in _places(settings, job.rank):
        yield raw_gather(addresses, sizes, buffer.ctypes.data) // itemsize


def plan(settings: LoaderSettings, _job: Job, _stack: ExitStack) -> Iterator[int]:
    """Every step planned anew."""
    feed, _ = _planned(settings)
    return (step.plan.tokens for step in _steps(Feed(feed.settings)))


def gather(settings: LoaderSettings, job: Job, _stack: ExitStack) -> Iterator[int]:
    """The loader's gather alone, to memory that is used again, as a ring's is."""
    shards, outlines = _planned(settings)[0].shards, _outlines(settings, job.rank)
    block = np.empty(max(each.nbytes for each in outlines), np.uint8)
    for each in outlines:
        write(shards, each, block)
        yield int(each.scalars["tokens"])


def inline(settings: LoaderSettings, job: Job, stack: ExitStack) -> Iterator[int]:
    """The whole loader in this process."""
    loader = stack.enter_context(Loader(settings, rank=job.rank, mode="inline"))
    return (batch.tokens for batch in loader)


def process(_settings: LoaderSettings, job: Job, stack: ExitStack) -> Iterator[int]:
    """The rank's side of a loader process."""
    loader = stack.enter_context(Loader(rank=job.rank, endpoint=job.endpoint, timeout=TIMEOUT, **job.loader))
    return (batch.tokens for batch in loader)


def first(settings: LoaderSettings, job: Job, stack: ExitStack) -> Iterator[int]:
    """A generator: the loader is opened when the first batch is asked for, which is what is timed."""
    loader = stack.enter_context(Loader(settings, rank=job.rank, timeout=TIMEOUT, **job.loader))
    yield next(iter(loader)).tokens


def resume(settings: LoaderSettings, job: Job, _stack: ExitStack) -> Iterator[int]:
    """Any document may begin a step, so any is a position."""
    loader, start = _opened(settings)
    drawn = random.Random(job.seed).randrange(len(_planned(settings)[0].shards))
    state = StreamState.from_dict(start["stream"])
    there = replace(state, sources=(replace(state.sources[0], position=drawn),))
    return _resumed(loader, start | {"stream": there.to_dict()})


def _resumed(loader: Loader, state: dict[str, Any]) -> Iterator[int]:
    loader.load_state_dict(state)
    yield next(iter(loader)).tokens


WAYS: dict[str, Way] = {
    COPY: copy,
    EQUAL: equal,
    RAW: raw,
    PLAN: plan,
    GATHER: gather,
    INLINE: inline,
    PROCESS: process,
    FIRST: first,
    RESUME: resume,
}


def carry_out(job: Job) -> Taken:
    """Do one job and time it, from the request for the first batch to the last tensor. What ways share is read, planned
    and opened before."""
    settings = LoaderSettings.from_json(job.settings)
    with ExitStack() as stack:
        _prepare(settings, job)
        batches = [WAYS[job.way](settings, job, stack) for _ in range(job.passes)]
        time.sleep(max(0.0, job.start - time.monotonic()))
        before = cpu_of_children()
        begin, cpu = time.monotonic(), time.process_time()
        tokens = sum(chain.from_iterable(batches))
        end, used = time.monotonic(), time.process_time() - cpu
        return Taken(begin=begin, end=end, cpu=used, children=cpu_of_children() - before, tokens=tokens)


def _prepare(settings: LoaderSettings, job: Job) -> None:
    """Fill what ways that are generators would else fill while they are timed."""
    if job.way in (COPY, EQUAL):
        _mapped(settings.data)
    if job.way == EQUAL:
        _warm(settings)
    if job.way == RAW:
        _places(settings, job.rank)
    if job.way == GATHER:
        _outlines(settings, job.rank)


def _packs(ids: list[npt.NDArray[Any]], capacity: int) -> Iterator[npt.NDArray[Any]]:
    """Views of at most `capacity` tokens, in order."""
    return (each[first : first + capacity] for each in ids for first in range(0, len(each), capacity))


@cache
def _mapped(folder: str) -> list[npt.NDArray[Any]]:
    """The token ids of each record batch, memory-mapped."""
    return list(mapped_ids(Path(folder)))


@cache
def _planned(settings: LoaderSettings) -> tuple[Feed, list[Step]]:
    """The set and all its steps."""
    feed = Feed(settings)
    return feed, list(_steps(feed))


def _steps(feed: Feed) -> Iterator[Step]:
    state = feed.start
    while step := feed.step(state):
        yield step
        state = step.after


@cache
def _places(settings: LoaderSettings, rank: int) -> list[tuple[Int64Array, Int64Array]]:
    """Addresses and bytes of the whole documents of each of this rank's batches."""
    feed, steps = _planned(settings)
    found = []
    for step in steps:
        for wave in range(int(step.plan.waves[rank])):
            order = step.plan.document[step.plan.pieces(rank, wave)]
            addresses = feed.shards.places(step.documents.document[order])[0]
            found.append((addresses, step.plan.lengths[order] * feed.shards.token_dtype.itemsize))
    return found


@cache
def _outlines(settings: LoaderSettings, rank: int) -> list[Outline]:
    """All of this rank's batches, but for their tokens."""
    return [
        outline(step, rank, wave, settings)
        for step in _planned(settings)[1]
        for wave in range(int(step.plan.waves[rank]))
    ]


@cache
def _opened(settings: LoaderSettings) -> tuple[Loader, dict[str, Any]]:
    """A loader open for the rest of this process, its routines compiled, and its state at the start."""
    loader = Loader(settings, rank=0, mode="inline")
    start = loader.state_dict()
    next(iter(loader))
    return loader, start


@cache
def _field_bytes(settings: LoaderSettings) -> list[float]:
    """Bytes a token of each field of the loader's first batch."""
    with Loader(settings, rank=0, mode="inline") as loader:
        batch = next(iter(loader))
    fields = [getattr(batch, name) for name in ARRAYS]
    return [field.numel() * field.element_size() / batch.tokens for field in fields if field is not None]


@cache
def _warm(settings: LoaderSettings) -> npt.NDArray[np.uint8]:
    """Packs' bytes to copy from, written once so that the memory is there."""
    return np.ones((WARM_PACKS, int(max(_field_bytes(settings)) * settings.capacity) + 1), np.uint8)


def main() -> None:
    """Answer jobs until the input ends."""
    for line in sys.stdin:
        taken = carry_out(Job(**json.loads(line)))
        sys.stdout.write(json.dumps(asdict(taken)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
