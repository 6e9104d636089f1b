"""An optimizer from its settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.optim.lamb import Lamb, Sum
from seqmesh.trainer.optim.trained import Trained, each_by_itself


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Over a model's parameters, all of them on this rank."""
    trained = each_by_itself(parameters)
    return make_optimizer_over(trained, len(trained), config)


def make_optimizer_over(
    trained: Sequence[Trained], count: int, config: OptimConfig, sum_: Sum | None = None
) -> torch.optim.Optimizer:
    """Over what this rank has to update of the model's `count` parameters. sum_: sums over the ranks, where parameters
    lie on several."""
    groups: list[dict[str, Any]] = [
        {"params": [each.parameter for each in trained if each.decayed], "weight_decay": config.weight_decay},
        {"params": [each.parameter for each in trained if not each.decayed], "weight_decay": 0.0},
    ]
    if config.name == "lamb":
        return Lamb(groups, trained, count, lr=config.lr, betas=config.betas, eps=config.eps, sum_=sum_)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
