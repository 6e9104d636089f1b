"""Names of what a checkpoint holds, in every way of spreading a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seqmesh.trainer.models.places import part_of
from seqmesh.trainer.optim.trained import state_of
from seqmesh.trainer.part import Saved, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


def whole_tensors(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> Saved:
    """Parameters that the optimizer updates one by one, plain or DTensor, and its state."""
    saved: Saved = {f"model/{name}": part_of(parameter.detach()) for name, parameter in named.items()}
    for name, parameter in named.items():
        state = state_of(optimizer, parameter)
        saved |= {f"optimizer/{name}/{moment}": part_of(state[moment]) for moment in MOMENTS}
    return saved | {"optimizer/step": whole(step_of(optimizer))}


def step_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """The count of steps that is saved: that of the first parameter."""
    return _counts(optimizer)[0]


def spread_step(optimizer: torch.optim.Optimizer) -> None:
    """All parameters have done as many steps as `step_of` says."""
    first, *others = _counts(optimizer)
    for count in others:
        count.copy_(first)


def _counts(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state_of(optimizer, p)["step"] for group in optimizer.param_groups for p in group["params"]]
