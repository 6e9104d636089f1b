"""Every replica has all parameters and updates them all.

Replicas may differ in their number of micro-batches, since nothing crosses between them, rings apart, until one
reduction at the end.
"""

from __future__ import annotations

import torch

from seqmesh.trainer.grid import Grid
from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.optim.make import make_optimizer_over
from seqmesh.trainer.part import Saved
from seqmesh.trainer.replicas.flat import common_begin, end_of, lay_out
from seqmesh.trainer.replicas.held import Holding, trained_of
from seqmesh.trainer.replicas.saved import spread_step, tensors_of
from seqmesh.trainer.replicas.tied import Ends
from seqmesh.trainer.replicas.totals import Totals


class Replicated:
    """All gradients of this process's parameters as one flat tensor: one reduction takes them all.

    Parameters' `.grad` are views of it, so autograd accumulates straight into it, over as many micro-batches as a
    replica has. One without documents has zeros.
    """

    runs_every_wave = False

    def __init__(self, holding: Holding, grid: Grid, *, extra: int) -> None:
        self._holding, self._grid = holding, grid
        slots = lay_out(holding.updated)
        first = slots[0].held.parameter
        self.gradient = torch.zeros(end_of(slots), dtype=first.dtype, device=first.device)
        for slot in slots:
            slot.held.parameter.grad = slot.of(self.gradient)
        self._common = self.gradient[common_begin(slots) :]
        self._ends = Ends(holding, grid.stages)
        self._totals = Totals(grid.world, extra)
        self.extra = self._totals.extra

    def make_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        holding, grid = self._holding, self._grid
        if grid.world.count == grid.data.count:  # every process knows all norms by itself
            return make_optimizer_over(trained_of(holding.updated), holding.count, config)
        trained = trained_of(holding.updated, counted=grid.data.is_first)
        return make_optimizer_over(trained, holding.count, config, grid.world.sum_)

    def begin_step(self) -> None:
        pass

    def before_backward(self, *, last: bool) -> None:
        pass

    def reduce_(self) -> None:
        grid = self._grid
        self._ends.add_()
        grid.data.sum_(self.gradient)
        grid.tensor.sum_(self._common)
        counted = self.gradient[: len(self.gradient) - len(self._common) * (not grid.tensor.is_first)]
        self._totals.reduce_([counted.tensor_split(grid.data.count)[grid.data.rank]])

    def norm(self) -> float:
        return self._totals.norm()

    def scale_(self, factor: float) -> None:
        self.gradient.mul_(factor)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._ends.share_()

    def zero_(self) -> None:
        self._ends.zero_()
        self.gradient.zero_()
        self._totals.zero_()

    def tensors(self, optimizer: torch.optim.Optimizer) -> Saved:
        return tensors_of(self._holding, optimizer)

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        spread_step(optimizer)
