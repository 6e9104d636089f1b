"""Where every tensor of a checkpoint lies: one safetensors file a process.

What all replicas have is written by one of them, so that each writes about as much; everything else by who holds it.
All of it is fixed by names, shapes and parts, which do not change while a job runs: it is computed once, and a save
exchanges nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData

from seqmesh.trainer.checkpoints.index import DTYPE_NAMES, Entry, RankFile, index_bytes
from seqmesh.trainer.checkpoints.parts import planned, share_out
from seqmesh.trainer.grid import Grid
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved

ALIGNED = 64  # bytes that the first tensor of a file is aligned to


def lay_out(tensors: Saved, grid: Grid) -> tuple[RankFile, bytes]:
    """This rank's file, and on the first rank the index. Every rank calls it.

    Raises ValueError on every rank where parts overlap or do not make the whole tensor, or for a type that can not be
    written.
    """
    local = create_default_local_save_plan(planned(_written(tensors, grid.data)), is_coordinator=True)
    ranks = grid.world
    locals_ = _to_first(local, ranks)
    answers: list[Any] | None = None
    if locals_ is not None:
        try:
            files = [_rank_file(rank, plan) for rank, plan in enumerate(_checked(locals_))]
            answers = list(files)
        except ValueError as error:
            answers = [str(error)] * ranks.count
    own = _from_first(answers, ranks)
    if isinstance(own, str):
        raise ValueError(own)
    return own, index_bytes(answers) if answers else b""


def _written(tensors: Saved, data: Ranks) -> Saved:
    """What this process writes."""
    writers = share_out(tensors, data.count)
    return {
        name: part for name, part in tensors.items() if not part.spare and writers.get(name, data.rank) == data.rank
    }


def _to_first(plan: SavePlan, ranks: Ranks) -> list[SavePlan] | None:
    """Every rank's plan on the first rank, None on the others."""
    if ranks.count == 1:
        return [plan]
    box: list[SavePlan] | None = [plan] * ranks.count if ranks.is_first else None
    dist.gather_object(plan, box, dst=0)
    return box


def _from_first(answers: list[Any] | None, ranks: Ranks) -> Any:
    if ranks.count == 1:
        assert answers is not None
        return answers[0]
    box: list[Any] = [None]
    dist.scatter_object_list(box, answers, src=0)
    return box[0]


def _checked(plans: list[SavePlan]) -> list[SavePlan]:
    """What each rank writes. Raises ValueError unless they make the whole of every tensor, once."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    done, metadata = planner.create_global_plan(plans)
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        held, wanted = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
        if held != wanted:
            raise ValueError(f"{name}: the ranks have {held:,} of its {wanted:,} elements")
    return done


def _rank_file(rank: int, plan: SavePlan) -> RankFile:
    chunks = [(item.index.fqn, item.tensor_data) for item in plan.items if item.tensor_data is not None]
    chunks.sort(key=lambda chunk: -chunk[1].properties.dtype.itemsize)  # so that each is aligned
    sizes = [math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for _, data in chunks]
    bounds = list(accumulate(sizes, initial=0))
    ends = bounds[1:]
    entries = tuple(
        _entry(name, data, begin, end) for (name, data), begin, end in zip(chunks, bounds, ends, strict=False)
    )
    name = f"rank-{rank:05d}.safetensors"
    return RankFile(name=name, header=_header(entries), entries=entries, size=bounds[-1])


def _entry(name: str, data: TensorWriteData, begin: int, end: int) -> Entry:
    dtype = data.properties.dtype
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} is {dtype}: must be one of {', '.join(map(str, DTYPE_NAMES))}")
    offsets, sizes = data.chunk.offsets, data.chunk.sizes
    return Entry(name=name, dtype=dtype, shape=data.size, offsets=offsets, sizes=sizes, begin=begin, end=end)


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
