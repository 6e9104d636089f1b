"""LAMB written down element by element, as the paper has it (You et al. 2020, algorithm 2), to compare with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from seqmesh.trainer.optim import OptimConfig


class SlowLamb:
    """Updates whole parameters in place. Decay is on matrices only."""

    def __init__(self, parameters: Sequence[Tensor], config: OptimConfig) -> None:
        self.parameters = list(parameters)
        self.config = config
        self.count = 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        self.count += 1
        beta1, beta2 = self.config.betas
        for i, (x, g) in enumerate(zip(self.parameters, gradients, strict=True)):
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * g * g
            mean, square = self.m[i] / (1 - beta1**self.count), self.v[i] / (1 - beta2**self.count)
            update = mean / (square.sqrt() + self.config.eps) + (self.config.weight_decay if x.ndim > 1 else 0.0) * x
            weight_norm, update_norm = float((x * x).sum()) ** 0.5, float((update * update).sum()) ** 0.5
            ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
            x -= rate * ratio * update
