"""Reading tensors of a verified checkpoint into place: ranges of files, as torch.distributed.checkpoint plans them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from seqmesh.trainer.checkpoints.index import Chunks, read_index
from seqmesh.trainer.checkpoints.manifest import DamageError, verify
from seqmesh.trainer.checkpoints.parts import planned
from seqmesh.trainer.part import Saved, whole

MODEL = "model/"


def read_model(path: Path) -> dict[str, Tensor]:
    """All parameters of a checkpoint, whole, by name. Needs no process group. Raises CheckpointError."""
    return {name.removeprefix(MODEL): tensor for name, tensor in read_whole(path, MODEL).items()}


def read_whole(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a checkpoint whose names begin so, whole. Raises CheckpointError."""
    verify(path)
    index = read_index(path)
    tensors: Saved = {
        name: whole(torch.empty(entry.size, dtype=entry.properties.dtype))
        for name, entry in index.metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    read_into(path, index, tensors)
    return {name: part.local for name, part in tensors.items()}


@torch.no_grad()
def read_into(path: Path, index: Chunks, tensors: Saved) -> int:
    """Fill what this rank has of `tensors`, in place; returns the bytes read. They fit the index in name, shape and
    type. Raises DamageError naming the file, OSError."""
    plan = create_default_local_load_plan(planned(tensors), index.metadata)
    files: dict[str, list[ReadItem]] = {}
    for item in plan.items:
        files.setdefault(index.places[item.storage_index][0], []).append(item)
    count = 0
    for name, items in files.items():
        descriptor = os.open(path / name, os.O_RDONLY)
        try:
            count += sum(_read(descriptor, path / name, item, index, tensors) for item in items)
        finally:
            os.close(descriptor)
    return count


def _read(descriptor: int, path: Path, item: ReadItem, index: Chunks, tensors: Saved) -> int:
    """One region of a chunk: its rows are read whole, and cut to the region's columns."""
    target = tensors[item.dest_index.fqn].local
    for dim, (begin, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        target = target.narrow(dim, begin, length)
    sizes = _chunk(index, item).sizes
    first, rows = (item.storage_offsets[0], item.lengths[0]) if sizes else (0, 1)
    row_bytes = math.prod(sizes[1:]) * target.element_size()
    straight = target.is_contiguous() and target.device.type == "cpu" and item.lengths[1:] == sizes[1:]
    there = target if straight else torch.empty((rows, *sizes[1:]) if sizes else (), dtype=target.dtype)
    place = index.places[item.storage_index][1] + first * row_bytes
    _fill(descriptor, path, there, place)
    if not straight:
        for dim in range(1, len(sizes)):
            there = there.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target.copy_(there)
    return rows * row_bytes


def _chunk(index: Chunks, item: ReadItem) -> ChunkStorageMetadata:
    """What is stored where the item reads."""
    entry = index.metadata.state_dict_metadata[item.storage_index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    return next(chunk for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)


def _fill(descriptor: int, path: Path, tensor: Tensor, place: int) -> None:
    room = tensor.reshape(-1).view(torch.uint8).numpy().data
    while room:
        count = os.preadv(descriptor, [room], place)
        if count == 0:
            raise DamageError(f"{path}: ends at byte {place:,}, within a tensor")
        room, place = room[count:], place + count
