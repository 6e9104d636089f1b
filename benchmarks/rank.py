"""A rank of `seqmesh bench loader`: a process that turns shards into torch tensors, in several ways, and times itself.

`python -m seqmesh.benchmarks.rank` reads one `Job` as JSON per line of its input and answers each with one line, a
`Taken`. The process stays for all jobs of a benchmark: importing and compiling happen before anything is counted.
With several ranks each reads its share of the set.

    copy         the tokens of the memory-mapped shards in their order, as int32 tensors: what any loader must do
    same fields  the same, as all the fields that a batch of the loader has: as many bytes are written
    gather       batches that were planned beforehand, gathered document by document in shuffled order; numpy arrays
    inline       `Loader(mode="inline")`: order, planning, gathering and conversion in this process
    process      `Loader(endpoint=...)`: the same from a loader process
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from seqmesh.benchmarks.loader import COPY, GATHER, INLINE, PROCESS, SAME_FIELDS, Job, Taken
from seqmesh.loader.batch import fill, outline
from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed
from seqmesh.loader.manifest import read_manifest
from seqmesh.loader.planner import Step
from seqmesh.loader.settings import LoaderSettings

TIMEOUT = 120.0  # seconds

# A way of reading: what must be open beforehand goes on the stack, the result gives the tokens of batch after batch.
Way = Callable[[LoaderSettings, Job, ExitStack], Iterator[int]]


def copy(settings: LoaderSettings, job: Job, _stack: ExitStack) -> Iterator[int]:
    """Plain memory-mapped copy to int32 tensors."""
    return (len(_own(ids, np.int32)) for ids in _packs(settings, job.rank))


def same_fields(settings: LoaderSettings, job: Job, _stack: ExitStack) -> Iterator[int]:
    """Ids and labels as int64 and positions as int32: what a batch holds, without documents or order."""
    for ids in _packs(settings, job.rank):
        fields = _own(ids, np.int64), _own(ids, np.int64), torch.arange(len(ids), dtype=torch.int32)
        yield len(fields[0])


def gather(settings: LoaderSettings, job: Job, _stack: ExitStack) -> Iterator[int]:
    """The loader's gather alone."""
    feed, steps = _planned(settings)
    return (
        fill(feed.shards, outline(step, job.rank, wave, settings)).tokens
        for step in steps
        for wave in range(int(step.plan.waves[job.rank]))
    )


def inline(settings: LoaderSettings, job: Job, stack: ExitStack) -> Iterator[int]:
    """The whole loader in this process."""
    loader = stack.enter_context(Loader(settings, rank=job.rank, mode="inline"))
    return (batch.tokens for batch in loader)


def process(_settings: LoaderSettings, job: Job, stack: ExitStack) -> Iterator[int]:
    """The rank's side of a loader process."""
    loader = stack.enter_context(Loader(rank=job.rank, endpoint=job.endpoint, timeout=TIMEOUT))
    return (batch.tokens for batch in loader)


WAYS: dict[str, Way] = {COPY: copy, SAME_FIELDS: same_fields, GATHER: gather, INLINE: inline, PROCESS: process}


def carry_out(job: Job) -> Taken:
    """Do one job and time it, from the request for the first batch to the last tensor."""
    settings = LoaderSettings.from_json(job.settings)
    with ExitStack() as stack:
        batches = [WAYS[job.way](settings, job, stack) for _ in range(job.passes)]
        time.sleep(max(0.0, job.start - time.monotonic()))
        begin, cpu = time.monotonic(), time.process_time()
        tokens = sum(chain.from_iterable(batches))
        return Taken(begin=begin, end=time.monotonic(), cpu=time.process_time() - cpu, tokens=tokens)


def _packs(settings: LoaderSettings, rank: int) -> Iterator[npt.NDArray[Any]]:
    """This rank's share of the tokens, as views of `capacity` of the memory-mapped shards."""
    number = 0
    for ids in _mapped(settings.data):
        for first in range(0, len(ids), settings.capacity):
            if number % settings.ranks == rank:
                yield ids[first : first + settings.capacity]
            number += 1


def _own(ids: npt.NDArray[Any], dtype: type[np.signedinteger[Any]]) -> torch.Tensor:
    """A tensor with memory of its own."""
    return torch.from_numpy(ids.astype(dtype))


@cache
def _mapped(folder: str) -> list[npt.NDArray[Any]]:
    """The token ids of each record batch, memory-mapped."""
    found = []
    for shard in read_manifest(Path(folder)).shards:
        reader = pa.ipc.open_file(pa.memory_map(str(Path(folder) / shard.file)))
        columns: list[Any] = [reader.get_batch(i).column("input_ids") for i in range(reader.num_record_batches)]
        found += [column.values.to_numpy(zero_copy_only=True) for column in columns]
    return found


@cache
def _planned(settings: LoaderSettings) -> tuple[Feed, list[Step]]:
    """The set and all its steps."""
    feed = Feed(settings)
    steps = []
    state = feed.start
    while step := feed.step(state):
        steps.append(step)
        state = step.after
    return feed, steps


def main() -> None:
    """Answer jobs until the input ends."""
    for line in sys.stdin:
        taken = carry_out(Job(**json.loads(line)))
        sys.stdout.write(json.dumps(asdict(taken)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
