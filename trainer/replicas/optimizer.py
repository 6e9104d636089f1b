"""Every rank has all parameters, and updates a part of them: the optimizer's state is spread (ZeRO-1; ByteScale's way).

As with replicated parameters, nothing crosses between ranks, rings apart, until the step's end: there every rank gets
the sum of its shard's gradient, updates it, and sends it to all. That is as many bytes as one reduction of everything,
and the optimizer's work and memory are divided by the number of ranks.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.optim.make import make_optimizer_over
from seqmesh.trainer.optim.trained import Trained, state_of
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Part, Saved, whole
from seqmesh.trainer.replicas.flat import cuts, lay_out
from seqmesh.trainer.replicas.saved import MOMENTS, spread_step, step_of
from seqmesh.trainer.replicas.totals import Totals


class OptimizerSharded:
    """Parameters are views of one flat buffer, gradients of another. The shard is one or two stretches of them, of
    matrices and of vectors: the optimizer has no more parameters than that."""

    runs_every_wave = False

    def __init__(self, model: nn.Module, ranks: Ranks, *, extra: int) -> None:
        self._slots = lay_out(model)
        self._ranks = ranks
        bounds = cuts(self._slots, ranks.count)
        self._sizes = [high - low for low, high in itertools.pairwise(bounds)]
        self._low, self._high = bounds[ranks.rank], bounds[ranks.rank + 1]
        self._values, self._gradient = self._move(model)
        self._shard_gradient = torch.zeros_like(self._values[self._low : self._high])
        vectors = min((slot.start for slot in self._slots if len(slot.shape) <= 1), default=self._high)
        between = min(max(vectors, self._low), self._high)
        self._trained = [
            self._stretch(self._low, between, decayed=True),
            self._stretch(between, self._high, decayed=False),
        ]
        self._totals = Totals(ranks, extra)
        self.extra = self._totals.extra

    def _move(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Put the model's parameters into one buffer; it, and the one of their gradients."""
        named = dict(model.named_parameters())
        first = named[self._slots[0].name]
        values = torch.zeros(self._slots[-1].end, dtype=first.dtype, device=first.device)
        gradient = torch.zeros_like(values)
        for slot in self._slots:
            parameter = named[slot.name]
            slot.of(values).copy_(parameter.detach())
            parameter.data = slot.of(values)
            parameter.grad = slot.of(gradient)
        return values, gradient

    def _stretch(self, low: int, high: int, *, decayed: bool) -> Trained:
        parameter = nn.Parameter(self._values[low:high])
        parameter.grad = self._shard_gradient[low - self._low : high - self._low]
        # What is between two parameters counts as the first one's: it is zero.
        inside = {slot.number: min(slot.end, high) - max(slot.start, low) for slot in self._slots}
        held = {number: size for number, size in inside.items() if size > 0} or {0: 0}
        return Trained(parameter=parameter, decayed=decayed, owners=tuple(held), sizes=tuple(held.values()))

    def make_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        return make_optimizer_over(self._trained, len(self._slots), config, self._ranks.sum_)

    def begin_step(self) -> None:
        pass

    def before_backward(self, *, last: bool) -> None:
        pass

    def reduce_(self) -> None:
        self._ranks.sum_shards(self._shard_gradient, torch.split(self._gradient, self._sizes))
        self._totals.reduce_([self._shard_gradient])

    def norm(self) -> float:
        return self._totals.norm()

    def scale_(self, factor: float) -> None:
        self._shard_gradient.mul_(factor)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._share_values()

    def _share_values(self) -> None:
        self._ranks.share_shards_(torch.split(self._values, self._sizes))

    def zero_(self) -> None:
        self._gradient.zero_()
        self._totals.zero_()

    def tensors(self, optimizer: torch.optim.Optimizer) -> Saved:
        """Parameters and state are rows of this rank's shard alone: every rank saves and reads its own."""
        saved: Saved = {}
        for slot in self._slots:
            trained = self._trained[len(slot.shape) <= 1]
            base = self._low if trained.decayed else self._high - trained.parameter.numel()
            start, rows = slot.rows(self._low, self._high)
            begin = slot.start + start * slot.row - base
            state = state_of(optimizer, trained.parameter)
            held = {f"model/{slot.name}": trained.parameter.detach()}
            held |= {f"optimizer/{slot.name}/{moment}": state[moment] for moment in MOMENTS}
            for name, buffer in held.items():
                local = buffer[begin : begin + rows * slot.row] if rows else buffer[:0]
                offsets = (start, *(0 for _ in slot.shape[1:]))
                saved[name] = Part(local=local.view(rows, *slot.shape[1:]), shape=slot.shape, offsets=offsets)
        return saved | {"optimizer/step": whole(step_of(optimizer))}

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        spread_step(optimizer)
        self._share_values()
