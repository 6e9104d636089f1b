"""Names of what a checkpoint holds, in every way of spreading a model."""

from __future__ import annotations

import torch
from torch import Tensor

from seqmesh.trainer.models.places import part_of
from seqmesh.trainer.optim.trained import state_of
from seqmesh.trainer.part import Part, Saved, whole
from seqmesh.trainer.replicas.held import Held, Holding

MOMENTS = ("exp_avg", "exp_avg_sq")


def tensors_of(holding: Holding, optimizer: torch.optim.Optimizer) -> Saved:
    """Of parameters that the optimizer updates one by one, whole or sharded, and of everything else."""
    saved: Saved = {}
    for held in holding.updated:
        state = state_of(optimizer, held.parameter)
        saved[f"model/{held.name}"] = _part(held.parameter.detach(), held)
        saved |= {f"optimizer/{held.name}/{moment}": _part(state[moment], held) for moment in MOMENTS}
    return saved | others_of(holding, optimizer)


def others_of(holding: Holding, optimizer: torch.optim.Optimizer) -> Saved:
    """What is saved beside the parameters that are updated here, and their moments."""
    saved = holding.rest | {"optimizer/step": whole(_counts(optimizer)[0], spare=holding.spare)}
    if holding.copy:
        saved[f"model/{holding.copy.name}"] = _part(holding.copy.parameter.detach(), holding.copy)
    return saved


def spread_step(optimizer: torch.optim.Optimizer) -> None:
    """All parameters have done as many steps as the first one, whose count is saved."""
    first, *others = _counts(optimizer)
    for count in others:
        count.copy_(first)


def _part(tensor: Tensor, held: Held) -> Part:
    return part_of(tensor, held.box, spare=held.spare)


def _counts(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state_of(optimizer, p)["step"] for group in optimizer.param_groups for p in group["params"]]
