"""An optimizer's settings, and the rate of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

Name = Literal["adamw", "lamb"]
Schedule = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """name: `adamw`, or `lamb`, which steps every parameter by its own norm, for large global batches.

    lr: at the end of the warm-up of `warmup` steps. schedule: from there to lr · final at the last step, by a `cosine`
    or `linear`; `constant` stays; `wsd` (warm-up, stable, decay) stays, and falls linearly in the last share `decay` of
    all steps. clip: largest gradient norm, None for no limit. weight_decay: decoupled, on matrices only.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    name: Name = "adamw"
    lr: float = 3e-4
    warmup: int = 0
    schedule: Schedule = "cosine"
    final: float = 0.1
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"lr is {self.lr}: must be a number of at least 0")
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}: must not be negative")
        for name in ("final", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be from 0 to 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}: must be from 0 to below 1")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps is {self.eps}: must be a number over 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is {self.weight_decay}: must be a number of at least 0")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}: must be over 0, or null for none")


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Rate for step `step` (from 0) of `steps`: reaches `lr` after the warm-up and `lr · final` at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    falls_from = config.warmup
    if config.schedule == "wsd":
        falls_from = max(config.warmup, steps - 1 - math.ceil(config.decay * steps))
    fallen = min(max(step - falls_from, 0) / max(steps - 1 - falls_from, 1), 1.0)
    left = (1 + math.cos(math.pi * fallen)) / 2 if config.schedule == "cosine" else 1 - fallen
    return config.lr * (config.final + (1 - config.final) * left)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
