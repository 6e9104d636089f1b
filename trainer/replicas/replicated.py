"""Every rank has all parameters and updates them all.

Ranks may differ in their number of micro-batches, since nothing crosses between them, rings apart, until one reduction
at the end.
"""

from __future__ import annotations

import torch
from torch import nn

from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.optim.make import make_optimizer
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved
from seqmesh.trainer.replicas.flat import lay_out
from seqmesh.trainer.replicas.saved import spread_step, whole_tensors
from seqmesh.trainer.replicas.totals import Totals


class Replicated:
    """All gradients of a model as one flat tensor: one reduction takes them all.

    Parameters' `.grad` are views of it, so autograd accumulates straight into it, over as many micro-batches as a
    rank has. A rank without documents has zeros.
    """

    runs_every_wave = False

    def __init__(self, model: nn.Module, ranks: Ranks, *, extra: int) -> None:
        slots = lay_out(model)
        self._named = dict(model.named_parameters())
        first = self._named[slots[0].name]
        self._ranks = ranks
        self.gradient = torch.zeros(slots[-1].end, dtype=first.dtype, device=first.device)
        for slot in slots:
            self._named[slot.name].grad = slot.of(self.gradient)
        self._totals = Totals(ranks, extra)
        self.extra = self._totals.extra

    def make_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        return make_optimizer(self._named.values(), config)

    def begin_step(self) -> None:
        pass

    def before_backward(self, *, last: bool) -> None:
        pass

    def reduce_(self) -> None:
        self._ranks.sum_(self.gradient)
        self._totals.reduce_([self.gradient.tensor_split(self._ranks.count)[self._ranks.rank]])

    def norm(self) -> float:
        return self._totals.norm()

    def scale_(self, factor: float) -> None:
        self.gradient.mul_(factor)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def zero_(self) -> None:
        self.gradient.zero_()
        self._totals.zero_()

    def tensors(self, optimizer: torch.optim.Optimizer) -> Saved:
        return whole_tensors(self._named, optimizer)

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        spread_step(optimizer)
