"""Where every tensor of a checkpoint lies: one safetensors file a process.

What all replicas have is written by one of them, so that each writes about as much; everything else by who holds it,
but for spares. All of it is fixed by names, shapes and parts, which do not change while a job runs: it is computed
once, and a save exchanges nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from seqmesh.trainer.checkpoints.cover import uncovered
from seqmesh.trainer.checkpoints.index import DTYPE_NAMES, Entry, RankFile, index_bytes
from seqmesh.trainer.checkpoints.parts import share_out
from seqmesh.trainer.grid import Grid
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Part, Saved

ALIGNED = 64  # bytes that the first tensor of a file is aligned to


def lay_out(tensors: Saved, grid: Grid) -> tuple[RankFile, bytes]:
    """This process's file, and on the first one the index. Every process calls it.

    Raises ValueError on every process where parts overlap or do not make the whole tensor, or for a type that can not
    be written.
    """
    own = _file_or_problem(tensors, grid)
    # The first process gets 240 bytes for every part that is written. Replicas that have all of their parameters write
    # each once, and of a spread optimizer each has shards of few: at 10,000 processes that is 4 to 40 MB, once. Only
    # shards of every parameter come to more, 600 MB where 64 peers divide a model of 80 layers.
    files = _to_first(own, grid.world)
    problem = _from_first(_problem(files), grid.world)
    if problem or isinstance(own, str):
        raise ValueError(problem)
    return own, index_bytes([file for file in files if not isinstance(file, str)]) if files else b""


def written(tensors: Saved, data: Ranks) -> Saved:
    """What this process writes."""
    writers = share_out(tensors, data.count)
    return {
        name: part for name, part in tensors.items() if not part.spare and writers.get(name, data.rank) == data.rank
    }


def rank_file(rank: int, tensors: Saved) -> RankFile:
    """The file of a process that writes these."""
    held = [(name, part) for name, part in tensors.items() if part.local.numel()]
    held.sort(key=lambda item: -item[1].local.itemsize)  # so that each is aligned
    bounds = list(accumulate((part.local.nbytes for _, part in held), initial=0))
    entries = tuple(
        _entry(name, part, begin, end) for (name, part), begin, end in zip(held, bounds[:-1], bounds[1:], strict=True)
    )
    name = f"rank-{rank:05d}.safetensors"
    return RankFile(name=name, header=_header(entries), entries=entries, size=bounds[-1])


def _file_or_problem(tensors: Saved, grid: Grid) -> RankFile | str:
    try:
        return rank_file(grid.world.rank, written(tensors, grid.data))
    except ValueError as error:
        return str(error)


def _to_first(file: RankFile | str, world: Ranks) -> list[RankFile | str]:
    """Every process's file on the first one, none on the others."""
    if world.count == 1:
        return [file]
    box: list[RankFile | str] | None = [file] * world.count if world.is_first else None
    dist.gather_object(file, box, dst=0)
    return box or []


def _from_first(problem: str, world: Ranks) -> str:
    box = [problem]
    if world.count > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _problem(files: Sequence[RankFile | str]) -> str:
    """What is wrong with what all processes write; empty where nothing is."""
    boxes = defaultdict[str, list[Entry]](list)
    for file in files:
        if isinstance(file, str):
            return file
        for entry in file.entries:
            boxes[entry.name].append(entry)
    return next(filter(None, map(uncovered, boxes.values())), "")


def _entry(name: str, part: Part, begin: int, end: int) -> Entry:
    dtype, offsets, sizes = part.local.dtype, torch.Size(part.offsets), part.local.shape
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} is {dtype}: must be one of {', '.join(map(str, DTYPE_NAMES))}")
    return Entry(name=name, dtype=dtype, shape=part.shape, offsets=offsets, sizes=sizes, begin=begin, end=end)


def _header(entries: Sequence[Entry]) -> bytes:
    """Of a safetensors file."""
    fields = {
        _chunk_name(e): {"dtype": DTYPE_NAMES[e.dtype], "shape": list(e.sizes), "data_offsets": [e.begin, e.end]}
        for e in entries
    }
    text = json.dumps(fields).encode()
    text = text.ljust(-(-(len(text) + 8) // ALIGNED) * ALIGNED - 8)
    return len(text).to_bytes(8, "little") + text


def _chunk_name(entry: Entry) -> str:
    """A whole tensor has its own name, a part of one says where it begins."""
    return entry.name if entry.sizes == entry.shape else f"{entry.name}@{','.join(map(str, entry.offsets))}"
