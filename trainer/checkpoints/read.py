"""Reading tensors of a verified checkpoint into place: ranges of files, as torch.distributed.checkpoint plans them."""

from __future__ import annotations

import math
import operator
import os
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from seqmesh.trainer.checkpoints.index import Chunks, read_index
from seqmesh.trainer.checkpoints.manifest import DamageError, verify
from seqmesh.trainer.part import Saved, whole

MODEL = "model/"
LONG = 4_096  # bytes of a row that are read by themselves


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
    files = defaultdict[str, list[ReadItem]](list)
    for name, part in tensors.items():
        if part.local.numel():
            wanted = ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=part.local.shape)
            for item in create_read_items_for_chunk_list(name, _entry(index, name), [wanted]):
                files[index.places[item.storage_index][0]].append(item)
    count = 0
    for name, items in files.items():
        descriptor = os.open(path / name, os.O_RDONLY)
        try:
            count += sum(_read(descriptor, path / name, item, index, tensors) for item in items)
        finally:
            os.close(descriptor)
    return count


def _read(descriptor: int, path: Path, item: ReadItem, index: Chunks, tensors: Saved) -> int:
    """One region of a chunk; returns the bytes read. Rows are read whole and cut to the region's columns; where those
    are long, they alone are."""
    target = tensors[item.dest_index.fqn].local
    for dim, (begin, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        target = target.narrow(dim, begin, length)
    offsets, lengths, sizes = item.storage_offsets, item.lengths, _chunk(index, item).sizes
    steps = [math.prod(sizes[dim + 1 :]) * target.element_size() for dim in range(len(sizes))]
    cut = [dim == 0 or (dim == 1 and lengths[1] * steps[1] >= LONG) for dim in range(len(sizes))]
    begins = [offset if there else 0 for offset, there in zip(offsets, cut, strict=True)]
    shape = torch.Size(length if there else size for length, size, there in zip(lengths, sizes, cut, strict=True))
    straight = target.is_contiguous() and target.device.type == "cpu" and shape == lengths
    read = target if straight else torch.empty(shape, dtype=target.dtype)
    place = index.places[item.storage_index][1] + sum(map(operator.mul, begins, steps))
    for number, run in enumerate([read] if shape[1:] == sizes[1:] else read.unbind()):
        _fill(descriptor, path, run, place + number * max(steps, default=0))
    if not straight:
        inside = map(operator.sub, offsets, begins)
        target.copy_(read[tuple(slice(begin, begin + size) for begin, size in zip(inside, lengths, strict=True))])
    return read.nbytes


def _entry(index: Chunks, name: str) -> TensorStorageMetadata:
    entry = index.metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _chunk(index: Chunks, item: ReadItem) -> ChunkStorageMetadata:
    """What is stored where the item reads."""
    chunks = _entry(index, item.storage_index.fqn).chunks
    return next(chunk for chunk in chunks if chunk.offsets == item.storage_index.offset)


def _fill(descriptor: int, path: Path, tensor: Tensor, place: int) -> None:
    room = tensor.reshape(-1).view(torch.uint8).numpy().data
    while room:
        count = os.preadv(descriptor, [room], place)
        if count == 0:
            raise DamageError(f"{path}: ends at byte {place:,}, within a tensor")
        room, place = room[count:], place + count
