"""AdamW with linear warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """lr: at the end of the warm-up of `warmup` steps; it falls by a cosine to lr · final at the last step. clip:
    largest gradient norm, None for no limit. weight_decay: decoupled, on matrices only.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    lr: float = 3e-4
    warmup: int = 0
    final: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"lr is {self.lr}: must be a number of at least 0")
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}: must not be negative")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final is {self.final}: must be from 0 to 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}: must be from 0 to below 1")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}: must be over 0, or null for none")


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Rate for step `step` (from 0) of `steps`: reaches `lr` after the warm-up and `lr · final` at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(steps - 1 - config.warmup, 1)
    return config.lr * (config.final + (1 - config.final) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW; vectors (norms) are not decayed."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
