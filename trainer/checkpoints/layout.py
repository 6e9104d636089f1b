"""Where every tensor of a checkpoint lies: one safetensors file a rank, and an index of them all.

torch.distributed.checkpoint's planner decides which rank writes what: a whole tensor, which all ranks have, is written
by one of them, so that each writes about as much. All of it is fixed by names, shapes and parts, which do not change
while a job runs: it is computed once, and a save exchanges nothing.

    {"model/w": {"dtype": "F32", "shape": [4, 8], "chunks": [
        {"file": "rank-00000.safetensors", "begin": 128, "offsets": [0, 0], "sizes": [4, 8]}]}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from seqmesh.trainer.checkpoints.manifest import TENSORS, DamageError
from seqmesh.trainer.checkpoints.parts import planned
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNED = 64  # bytes that the first tensor of a file is aligned to


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A chunk of a tensor. offsets, sizes: of the chunk in the tensor of `shape`. begin, end: bytes after the file's
    header."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    offsets: torch.Size
    sizes: torch.Size
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """What one rank writes: `header`, then `entries` one after the other, `size` bytes."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The index: where the chunks of all tensors lie, as the planner takes it. places: file and first byte of each."""

    metadata: Metadata
    places: dict[MetadataIndex, tuple[str, int]]


def lay_out(tensors: Saved, ranks: Ranks) -> tuple[RankFile, bytes]:
    """This rank's file, and on the first rank the index. Every rank calls it; names and shapes are the same on all.

    Raises ValueError on every rank where parts overlap or do not make the whole tensor, or for a type that can not be
    written.
    """
    local = create_default_local_save_plan(planned(tensors), ranks.is_first)
    locals_ = _to_first(local, ranks)
    answers: list[Any] | None = None
    if locals_ is not None:
        try:
            files = [_rank_file(rank, plan) for rank, plan in enumerate(_without_copies(locals_))]
            answers = list(files)
        except ValueError as error:
            answers = [str(error)] * ranks.count
    own = _from_first(answers, ranks)
    if isinstance(own, str):
        raise ValueError(own)
    return own, _index_bytes(answers) if answers else b""


def read_index(path: Path) -> Chunks:
    """Of the checkpoint at `path`, which was verified. Raises DamageError where it is not an index."""
    try:
        found = json.loads((path / TENSORS).read_bytes())
        metadata = Metadata({name: _storage_metadata(entry) for name, entry in found.items()})
        places = {
            MetadataIndex(name, chunk["offsets"]): (_plain_name(chunk["file"]), int(chunk["begin"]))
            for name, entry in found.items()
            for chunk in entry["chunks"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamageError(f"{path / TENSORS}: is not an index of tensors ({error})") from error
    return Chunks(metadata=metadata, places=places)


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


def _without_copies(plans: list[SavePlan]) -> list[SavePlan]:
    """What each rank writes, each chunk once. Raises ValueError unless they make the whole of every tensor."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    done, metadata = planner.create_global_plan(plans)
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        held, wanted = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
        if held != wanted:
            raise ValueError(f"{name}: the ranks have {held:,} of its {wanted:,} elements")
    return done


def _rank_file(rank: int, plan: SavePlan) -> RankFile:
    data = [(item.index.fqn, item.tensor_data) for item in plan.items]
    for name, tensor in data:
        assert tensor is not None
        if tensor.properties.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is {tensor.properties.dtype}: must be one of {', '.join(map(str, DTYPE_NAMES))}")
    chunks = [(name, tensor) for name, tensor in data if tensor is not None]
    chunks.sort(key=lambda chunk: -chunk[1].properties.dtype.itemsize)  # so that each is aligned
    sizes = [math.prod(tensor.chunk.sizes) * tensor.properties.dtype.itemsize for _, tensor in chunks]
    ends = list(accumulate(sizes))
    entries = tuple(
        Entry(
            name=name,
            dtype=tensor.properties.dtype,
            shape=tensor.size,
            offsets=tensor.chunk.offsets,
            sizes=tensor.chunk.sizes,
            begin=end - size,
            end=end,
        )
        for (name, tensor), size, end in zip(chunks, sizes, ends, strict=True)
    )
    name = f"rank-{rank:05d}.safetensors"
    return RankFile(name=name, header=_header(entries), entries=entries, size=ends[-1] if ends else 0)


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


def _index_bytes(files: Sequence[RankFile]) -> bytes:
    index: dict[str, Any] = {}
    for file in files:
        for e in file.entries:
            tensor = index.setdefault(
                e.name, {"dtype": DTYPE_NAMES[e.dtype], "shape": list(e.shape), "chunks": list[Any]()}
            )
            place = {"file": file.name, "begin": len(file.header) + e.begin}
            tensor["chunks"].append(place | {"offsets": list(e.offsets), "sizes": list(e.sizes)})
    return json.dumps(index, indent=1).encode() + b"\n"


def _storage_metadata(entry: dict[str, Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[entry["dtype"]]),
        size=torch.Size(entry["shape"]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(chunk["offsets"]), sizes=torch.Size(chunk["sizes"]))
            for chunk in entry["chunks"]
        ],
    )


def _plain_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a name of a file")
    return name
