"""Where a tensor lies: which part of the whole this process holds, so that whole values can be copied into it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from seqmesh.trainer.models.division import Box
from seqmesh.trainer.part import Part


def part_of(tensor: Tensor | DTensor, box: Box, *, spare: bool = False) -> Part:
    """This process's part of a parameter, or of its gradient or moment, where the replica's peers divide it as `box`
    says. A plain tensor is the box itself, a DTensor this process's shard of it. Nobody waits for another."""
    if not isinstance(tensor, DTensor):
        return Part(local=tensor, shape=box.shape, offsets=box.offsets, shared=True, spare=spare)
    _, inner = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    offsets = tuple(outer + start for outer, start in zip(box.offsets, inner, strict=True))
    return Part(local=tensor.to_local(), shape=box.shape, offsets=offsets, spare=spare)
