"""How a model's parameters lie on the ranks, and how a step's gradient comes together.

`Replicated` (mode `free`): every rank has all parameters; ranks may differ in their number of micro-batches, since
nothing crosses between ranks, rings apart, until one reduction at the end. `Sharded` (mode `waves`): FSDP2 keeps a part
of every parameter on each rank and gathers them again for every wave; all ranks run every wave, and gradients are
reduced in the last one only. Both sum gradients, never average them: the loss was divided by the whole step's count.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from seqmesh.packer.plan import Mode
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.parallel import Ranks


class Replica(Protocol):
    """A model that is ready for `step`: extra [n] are numbers that are summed over ranks with the gradient."""

    extra: Tensor
    runs_every_wave: bool  # whether a rank without tokens must run the model all the same

    def before_backward(self, *, last: bool) -> None:
        """To be called before each micro-batch; last: the step's gradient is complete after it."""

    def reduce_(self) -> None:
        """Sum gradient and `extra` over all ranks."""

    def norm(self) -> float:
        """Euclidean norm of the whole gradient, the same on all ranks."""

    def scale_(self, factor: float) -> None:
        """Multiply the gradient."""

    def zero_(self) -> None:
        """Clear gradient and `extra` for the next step."""


def make_replica(model: Transformer, ranks: Ranks, mode: Mode, *, extra: int) -> Replica:
    return Replicated(model, ranks, extra=extra) if mode == "free" else Sharded(model, ranks, extra=extra)


class Replicated:
    """All gradients of a model as one flat tensor, with `extra` at its end: one reduction takes them all.

    Parameters' `.grad` are views of it, so autograd accumulates straight into it, over as many micro-batches as a
    rank has. A rank without documents has zeros.
    """

    runs_every_wave = False

    def __init__(self, model: nn.Module, ranks: Ranks, *, extra: int) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        first = parameters[0]
        if mixed := {p.dtype for p in parameters} - {first.dtype}:
            raise ValueError(f"parameters are {first.dtype} and {mixed}: must be of one dtype")
        self._ranks = ranks
        self._flat = torch.zeros(sum(p.numel() for p in parameters) + extra, dtype=first.dtype, device=first.device)
        self.gradient = self._flat[: len(self._flat) - extra]
        self.extra = self._flat[len(self._flat) - extra :]
        parts = torch.split(self.gradient, [p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def before_backward(self, *, last: bool) -> None:
        pass

    def reduce_(self) -> None:
        self._ranks.sum_(self._flat)

    def norm(self) -> float:
        return float(torch.linalg.vector_norm(self.gradient))

    def scale_(self, factor: float) -> None:
        self.gradient.mul_(factor)

    def zero_(self) -> None:
        self._flat.zero_()


class Sharded:
    """A model under FSDP2, in place: every block and the rest are gathered for each wave, forward and backward."""

    runs_every_wave = True

    def __init__(self, model: Transformer, ranks: Ranks, *, extra: int) -> None:
        mesh = init_device_mesh(ranks.device.type, (ranks.count,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        assert isinstance(model, FSDPModule)
        self._model: FSDPModule = model
        self._parameters = list(model.parameters())
        self._ranks = ranks
        self.extra = torch.zeros(extra, dtype=self._parameters[0].dtype, device=ranks.device)

    def before_backward(self, *, last: bool) -> None:
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)

    def reduce_(self) -> None:
        self._ranks.sum_(self.extra)  # the last wave's backward has reduced the gradients

    def norm(self) -> float:
        total = torch.stack([shard.square().sum() for shard in self._shards()]).sum()
        self._ranks.sum_(total)
        return float(total.sqrt())

    def scale_(self, factor: float) -> None:
        for shard in self._shards():
            shard.mul_(factor)

    def zero_(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self.extra.zero_()

    def _shards(self) -> list[Tensor]:
        """This rank's part of every gradient."""
        return [p.grad.to_local() for p in self._parameters if isinstance(p.grad, DTensor)]
