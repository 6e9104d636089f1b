"""One step of a pipeline: every micro-batch forward and backward through the parts that this process holds.

Takes the replica's micro-batches, all of the step, and leaves gradients where autograd puts them. How a part of the
model is run is the caller's (`Passes`); when it is, `order` says. Shapes are known from each stage's own batch: all
processes of a replica read the same ones, and nothing is inferred or sent ahead. Between its forward and its backward
a micro-batch is held by its `Flight`; after it nothing is, but messages on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

from torch import Tensor

from seqmesh.loader.batch import PackedBatch
from seqmesh.trainer.grid import Grid
from seqmesh.trainer.pipeline.messages import Way
from seqmesh.trainer.pipeline.order import Operation, Place, operations

Batch = PackedBatch[Tensor]


class Flight(Protocol):
    """A micro-batch between the forward and the backward of one part. out: hidden rows for the next, or the loss."""

    out: Tensor

    def backward(self, gradient: Tensor | None = None) -> None:
        """gradient: of `out`; None for that of a loss. Once."""


class Passes(Protocol):
    """One process's parts of a model."""

    def begin(self, batch: Batch) -> None:
        """Called once for each micro-batch, before its first forward."""

    def room(self, batch: Batch) -> Tensor:
        """For hidden rows of this micro-batch, or their gradient; uninitialised."""

    def forward(self, batch: Batch, part: int, x: Tensor | None) -> Flight:
        """x: hidden rows of the part before; None for the first."""


class Pipeline:
    """A stage at work. All processes of the replica make one, with as many parts."""

    def __init__(self, passes: Passes, grid: Grid, parts: int = 1) -> None:
        self._passes = passes
        self._place = Place(stage=grid.stages.rank, stages=grid.stages.count, parts=parts)
        most = Place(stage=0, stages=grid.stages.count, parts=parts).ahead + 1
        self._onward, self._back = Way(grid.stages, 1, most), Way(grid.returns, -1, most)
        self._flying: dict[tuple[int, int], tuple[Tensor | None, Flight]] = {}

    def run(self, batches: Iterable[Batch]) -> None:
        """A step. They are all taken before the first is run."""
        taken = list(batches)
        order = operations([batch.tokens > 0 for batch in taken], self._place)
        for first in order[:1]:
            self._expect(first, taken)
        for operation, following in zip_longest(order, order[1:]):
            if following is not None:
                self._expect(following, taken)
            (self._backward if operation.backward else self._forward)(operation, taken)
        for way in (self._onward, self._back):
            way.finish()

    def _expect(self, operation: Operation, batches: Sequence[Batch]) -> None:
        """Post what an operation needs of others: one operation early, so that it comes during that."""
        if operation.backward and not self._place.ends(operation.part):
            self._back.expect(self._passes.room(batches[operation.batch]))
        if not operation.backward and not self._place.begins(operation.part):
            self._onward.expect(self._passes.room(batches[operation.batch]))

    def _forward(self, operation: Operation, batches: Sequence[Batch]) -> None:
        batch, part = batches[operation.batch], operation.part
        if part == 0:
            self._passes.begin(batch)
        x = None if self._place.begins(part) else self._onward.receive().requires_grad_()
        flight = self._passes.forward(batch, part, x)
        self._flying[operation.batch, part] = x, flight
        if not self._place.ends(part):
            self._onward.send(flight.out.detach())

    def _backward(self, operation: Operation, batches: Sequence[Batch]) -> None:  # noqa: ARG002 -- as `_forward`
        x, flight = self._flying.pop((operation.batch, operation.part))
        flight.backward(None if self._place.ends(operation.part) else self._back.receive())
        if x is not None:
            assert x.grad is not None
            self._back.send(x.grad)
