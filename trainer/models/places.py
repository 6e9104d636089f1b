"""Where a tensor lies: which part of the whole this process holds, so that whole values can be copied into it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from seqmesh.trainer.part import Part, whole


def part_of(tensor: Tensor | DTensor) -> Part:
    """This process's part of a tensor. A plain one is whole. Nobody waits for another."""
    if not isinstance(tensor, DTensor):
        return whole(tensor)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(local=tensor.to_local(), shape=tensor.shape, offsets=tuple(offsets))


def parts_of(model: nn.Module) -> dict[str, Part]:
    """This process's part of every parameter, by name."""
    return {name: part_of(parameter.detach()) for name, parameter in model.named_parameters()}
