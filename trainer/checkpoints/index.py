"""The index of a checkpoint: which bytes of which file hold which part of which tensor.

{"model/w": {"dtype": "F32", "shape": [4, 8], "chunks": [
    {"file": "rank-00000.safetensors", "begin": 128, "offsets": [0, 0], "sizes": [4, 8]}]}}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from seqmesh.trainer.checkpoints.manifest import TENSORS, DamageError

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


def index_bytes(files: Sequence[RankFile]) -> bytes:
    """The index of everything that all ranks write."""
    index: dict[str, Any] = {}
    for file in files:
        for e in file.entries:
            tensor = index.setdefault(
                e.name, {"dtype": DTYPE_NAMES[e.dtype], "shape": list(e.shape), "chunks": list[Any]()}
            )
            place = {"file": file.name, "begin": len(file.header) + e.begin}
            tensor["chunks"].append(place | {"offsets": list(e.offsets), "sizes": list(e.sizes)})
    return json.dumps(index, indent=1).encode() + b"\n"


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
