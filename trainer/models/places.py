"""Where a tensor lies: which part of the whole this rank holds, so that whole values can be copied into it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from seqmesh.trainer.part import Part

Place = tuple[slice, ...]


def place_of(tensor: Tensor | DTensor | Part) -> tuple[Tensor, Place]:
    """This rank's storage of a tensor, and the part of the whole that belongs there: `local.copy_(whole[place])`.

    A plain tensor is whole. No rank waits for another.
    """
    if isinstance(tensor, Part):
        return tensor.local, (slice(tensor.start, tensor.start + len(tensor.local)),)
    if not isinstance(tensor, DTensor):
        return tensor, (slice(None),)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    return tensor.to_local(), place
