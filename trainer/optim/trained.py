"""What an optimizer is handed: parameters as they are, or this rank's part of them, and whose elements they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A tensor that is updated: a parameter of the model, whole or as DTensor, or rows of several, end to end.

    decayed: whether weight decay applies. owners: numbers of the model's parameters whose elements lie in it on this
    rank, one after the other, `sizes` elements of each. counted: whether this rank counts them in norms; of those that
    have the same elements one does.
    """

    parameter: nn.Parameter
    decayed: bool
    owners: tuple[int, ...]
    sizes: tuple[int, ...]
    counted: bool = True


def each_by_itself(parameters: Iterable[nn.Parameter]) -> list[Trained]:
    """Parameters of a model as they are; matrices are decayed, vectors (norms) are not."""
    return [
        Trained(parameter=p, decayed=p.ndim > 1, owners=(number,), sizes=(local(p).numel(),))
        for number, p in enumerate(parameters)
    ]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, the storage itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The parameter's moments and count of steps, made as zeros where the optimizer has not made them yet."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter.detach())
        state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
    return state
