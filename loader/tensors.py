"""From a batch's arrays to torch tensors: copies that are safe to keep, or views of the memory they arrived in.

On a GPU the token fields go through pinned memory, asynchronously, as int32, and are widened there: half the bytes.
Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from seqmesh.loader.arena import Block, watched
from seqmesh.loader.batch import PackedBatch

ON_DEVICE = ("input_ids", "labels", "position_ids", "cu_seqlens")  # the rest describes segments: for the host
WIDENED = ("input_ids", "labels")  # int32 on the wire, int64 for torch's embedding and cross entropy

TorchBatch = PackedBatch[torch.Tensor]


LARGE = 1 << 16  # bytes, of an array whose copy is worth memory that is warm
SPARE_BLOCKS = 8


class WarmMemory:
    """Blocks of memory that are used again once no array or tensor over them is left. The system would take a large
    block back as soon as it is free, and give it out page by page again, which costs more than the copy."""

    def __init__(self) -> None:
        self._spare: deque[Block] = deque(maxlen=SPARE_BLOCKS)  # given back from whatever thread

    def empty(self, items: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of this size in a spare block that is large enough and not far larger, else in a new one."""
        size = items * np.dtype(dtype).itemsize
        block = self._taken(size)
        return watched(block, 0, size, partial(self._spare.append, block)).view(dtype)

    def _taken(self, size: int) -> Block:
        for _ in range(len(self._spare)):
            with contextlib.suppress(IndexError):
                block = self._spare.popleft()
                if size <= len(block) <= 2 * size + LARGE:
                    return block
                self._spare.append(block)
        return np.empty(size + size // 8, np.uint8)  # the next may be a little larger


class TensorMaker:
    """Turns the arrays of batches into tensors for one device, see `Loader` for `views`."""

    def __init__(self, device: torch.device, *, views: bool) -> None:
        self.device = device
        self._views = views
        self._memory = WarmMemory()
        if views:
            _silence_the_warning()

    def tensor(self, name: str, array: npt.NDArray[Any]) -> torch.Tensor:
        """The tensor of a field."""
        if self.device.type != "cpu" and name in ON_DEVICE:
            sent = _pinned(array).to(self.device, non_blocking=True)
            return sent.to(torch.int64) if name in WIDENED else sent
        if self._views:
            return torch.from_numpy(array)
        dtype = np.int64 if name in WIDENED else array.dtype
        copy = self._memory.empty(len(array), dtype) if array.nbytes >= LARGE else np.empty(len(array), dtype)
        copy[:] = array
        return torch.from_numpy(copy)


def _pinned(array: npt.NDArray[Any]) -> torch.Tensor:
    """A copy in pinned memory. torch keeps it from being used again until the stream that reads it has done so."""
    pinned = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=True)
    pinned.numpy()[...] = array
    return pinned


def _silence_the_warning() -> None:
    """torch warns once in a process that a tensor over read-only memory could be written to. Ours are meant to be:
    whoever writes to one gets a segmentation fault, not another rank's wrong tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"\0\0\0\0", np.uint8))
