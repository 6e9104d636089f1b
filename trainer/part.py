"""What a process holds of a tensor of the whole model, however it is cut: by tensor peers, by shards, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Place = tuple[slice, ...]


def place_of(offsets: Sequence[int], sizes: Sequence[int]) -> Place:
    """Where a box lies: `whole[place]`."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor of `shape`: `local` is what begins at `offsets`, one number a dimension, and may hold nothing.

    `local` is the storage itself: what is copied into it is what the owner sees. shared: all replicas have the same box
    here; one of them reads and writes it for all. spare: other peers of the replica have these elements, too, and
    write them: here they are only read.
    """

    local: Tensor
    shape: torch.Size
    offsets: tuple[int, ...]
    shared: bool = False
    spare: bool = False

    @property
    def place(self) -> Place:
        """`local.copy_(whole[place])`."""
        return place_of(self.offsets, self.local.shape)


def whole(tensor: Tensor, *, spare: bool = False) -> Part:
    """All of a tensor, the same on all replicas."""
    return Part(local=tensor, shape=tensor.shape, offsets=(0,) * tensor.ndim, shared=True, spare=spare)


Saved = dict[str, Part]
"""What a checkpoint holds, by name: `model/<parameter or buffer>`, `optimizer/<parameter>/<slot>`, `optimizer/step`. A
process has the names of its own layers; all processes together have every element. Names and whole shapes do not depend
on how the model is spread."""
