"""Every replica has all parameters, and updates a part of them: the optimizer's state is spread (ZeRO-1, ByteScale).

As with replicated parameters, nothing crosses between replicas, rings apart, until the step's end: there every one gets
the sum of its shard's gradient, updates it, and sends it to all. That is as many bytes as one reduction of everything,
and the optimizer's work and memory are divided by the number of replicas.

What tensor peers have in common, norms above all, is not spread: its gradient is summed over them, too, and their
shards are of other sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqmesh.trainer.grid import Grid
from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.optim.make import make_optimizer_over
from seqmesh.trainer.optim.trained import Trained, state_of
from seqmesh.trainer.part import Part, Saved
from seqmesh.trainer.replicas.flat import Slot, common_begin, cuts, end_of, lay_out
from seqmesh.trainer.replicas.held import Holding
from seqmesh.trainer.replicas.saved import MOMENTS, others_of, spread_step
from seqmesh.trainer.replicas.tied import Ends
from seqmesh.trainer.replicas.totals import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Elements [low, high) of the buffer, which this process updates."""

    low: int
    high: int
    trained: Trained


class OptimizerSharded:
    """Parameters are views of one flat buffer, gradients of another. The shard is one or two stretches of them, of
    matrices and of vectors, and so is what is common: the optimizer has no more parameters than that."""

    runs_every_wave = False

    def __init__(self, holding: Holding, grid: Grid, *, extra: int) -> None:
        self._holding, self._grid = holding, grid
        self._slots = lay_out(holding.updated)
        self._values, self._gradient = _move(self._slots)
        begin, end = common_begin(self._slots), end_of(self._slots)
        divided = [slot for slot in self._slots if not slot.held.common]
        bounds = cuts(divided, grid.data.count)
        self._sizes = [high - low for low, high in itertools.pairwise(bounds)]
        low, high = bounds[grid.data.rank], bounds[grid.data.rank + 1]
        self._shard, self._common = torch.zeros_like(self._values[low:high]), self._gradient[begin:]
        counts_common = grid.tensor.is_first and grid.data.is_first
        self._stretches = [
            *self._cut(divided, low, high, self._shard, counted=True),
            *self._cut(self._slots[len(divided) :], begin, end, self._common, counted=counts_common),
        ]
        self._ends = Ends(holding, grid.stages)
        self._totals = Totals(grid.world, extra)
        self.extra = self._totals.extra

    def _cut(self, slots: Sequence[Slot], low: int, high: int, gradient: Tensor, *, counted: bool) -> Iterator[Stretch]:
        """The matrices and the vectors of `slots` that are in [low, high), whose gradient is `gradient`."""
        vectors = next((slot.start for slot in slots if len(slot.shape) <= 1), high)
        between = min(max(vectors, low), high)
        for begin, end, decayed in ((low, between, True), (between, high, False)):
            parameter = nn.Parameter(self._values[begin:end])
            parameter.grad = gradient[begin - low : end - low]
            # What is between two parameters counts as the first one's: it is zero.
            inside = {slot.held.number: min(slot.end, end) - max(slot.start, begin) for slot in slots}
            held = {number: size for number, size in inside.items() if size > 0} or {0: 0}
            trained = Trained(
                parameter=parameter,
                decayed=decayed,
                owners=tuple(held),
                sizes=tuple(held.values()),
                counted=counted,
            )
            yield Stretch(low=begin, high=end, trained=trained)

    def make_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        trained = [each.trained for each in self._stretches[: 4 if len(self._common) else 2]]
        return make_optimizer_over(trained, self._holding.count, config, self._grid.world.sum_)

    def begin_step(self) -> None:
        pass

    def before_backward(self, *, last: bool) -> None:
        pass

    def reduce_(self) -> None:
        grid, begin = self._grid, len(self._gradient) - len(self._common)
        self._ends.add_()
        grid.data.sum_shards(self._shard, torch.split(self._gradient[:begin], self._sizes))
        if len(self._common):
            grid.data.sum_(self._common)
            grid.tensor.sum_(self._common)
        counted = [self._shard]
        if grid.tensor.is_first and grid.data.is_first:
            counted.append(self._common)
        self._totals.reduce_(counted)

    def norm(self) -> float:
        return self._totals.norm()

    def scale_(self, factor: float) -> None:
        self._shard.mul_(factor)
        self._common.mul_(factor)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._share_values()
        self._ends.share_()

    def _share_values(self) -> None:
        begin = len(self._values) - len(self._common)
        self._grid.data.share_shards_(torch.split(self._values[:begin], self._sizes))

    def zero_(self) -> None:
        self._ends.zero_()
        self._gradient.zero_()
        self._totals.zero_()

    def tensors(self, optimizer: torch.optim.Optimizer) -> Saved:
        """Parameters and state are rows of this process's shard alone: every process saves and reads its own."""
        saved: Saved = {}
        for slot in self._slots:
            stretch = self._stretches[2 * slot.held.common + (len(slot.shape) <= 1)]
            parameter = stretch.trained.parameter
            state = state_of(optimizer, parameter)
            buffers = {f"model/{slot.held.name}": parameter.detach()}
            buffers |= {f"optimizer/{slot.held.name}/{moment}": state[moment] for moment in MOMENTS}
            saved |= {name: _rows(buffer, slot, stretch) for name, buffer in buffers.items()}
        return saved | others_of(self._holding, optimizer)

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        spread_step(optimizer)
        self._share_values()


def _move(slots: Sequence[Slot]) -> tuple[Tensor, Tensor]:
    """Put parameters into one buffer; it, and the one of their gradients."""
    first = slots[0].held.parameter
    values = torch.zeros(end_of(slots), dtype=first.dtype, device=first.device)
    gradient = torch.zeros_like(values)
    for slot in slots:
        parameter = slot.held.parameter
        slot.of(values).copy_(parameter.detach())
        parameter.data = slot.of(values)
        parameter.grad = slot.of(gradient)
    return values, gradient


def _rows(buffer: Tensor, slot: Slot, stretch: Stretch) -> Part:
    """Those of a parameter that a stretch has, in a buffer of the stretch."""
    start, rows = slot.rows(stretch.low, stretch.high)
    begin = slot.start + start * slot.row - stretch.low if rows else 0
    box = slot.held.box
    first, *others = box.offsets
    return Part(
        local=buffer[begin : begin + rows * slot.row].view(rows, *slot.shape[1:]),
        shape=box.shape,
        offsets=(first + start, *others),
        shared=slot.held.common,
        spare=slot.held.spare,
    )
