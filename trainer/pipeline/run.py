"""One step of a pipeline: every micro-batch forward and backward through the parts that this process holds.

Takes the replica's micro-batches, all of the step, and leaves gradients where autograd puts them. How a part of the
model is run is the caller's (`Passes`); when it is, `order` says. Shapes are known from each stage's own batch: all
processes of a replica read the same ones, and nothing is inferred or sent ahead. Between its forward and its backward
a micro-batch is held by its `Flight`; after it nothing is, but messages on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from seqmesh.trainer.passes import Batch, Flight, Passes
from seqmesh.trainer.pipeline.messages import make_ways
from seqmesh.trainer.pipeline.order import Operation, Place, operations


class Pipeline:
    """The runner of a stage. All processes of the replica have one, with as many parts."""

    def __init__(self, passes: Passes, parts: int = 1) -> None:
        grid, self.passes = passes.grid, passes
        self._place = Place(stage=grid.stages.rank, stages=grid.stages.count, parts=parts)
        first = Place(stage=0, stages=grid.stages.count, parts=parts)
        self._rows, self._gradients = make_ways(grid, most=2 * (first.ahead + 1))
        self._flying: dict[tuple[int, int], Flight] = {}

    def run(self, batches: Iterable[Batch]) -> None:
        """A step. All batches are taken before the first is run."""
        taken = list(batches)
        order = operations([batch.tokens > 0 for batch in taken], self._place)
        for first in order[:1]:
            self._expect(first, taken)
        for operation, following in zip_longest(order, order[1:]):
            if following is not None:
                self._expect(following, taken)
            self.do(operation, taken[operation.batch])
        for way in (self._rows, self._gradients):
            way.finish()

    def _expect(self, operation: Operation, batches: Sequence[Batch]) -> None:
        """Post what an operation needs of others: one operation early, so that it comes during that."""
        alone = self._place.ends if operation.backward else self._place.begins
        if not alone(operation.part):
            way = self._gradients if operation.backward else self._rows
            way.expect(self.passes.room(batches[operation.batch]))

    def do(self, operation: Operation, batch: Batch) -> None:
        """One operation of a micro-batch, whatever it has to wait for."""
        if operation.backward:
            self._backward(self._flying.pop((operation.batch, operation.part)), operation.part)
        else:
            self._flying[operation.batch, operation.part] = self._forward(batch, operation.part)

    def _forward(self, batch: Batch, part: int) -> Flight:
        if part == 0:
            self.passes.begin(batch)
        ends = self._place.ends(part)
        x = None if self._place.begins(part) else self._rows.receive()
        flight = self.passes.forward(batch, part, x, at_once=ends)
        if not ends:
            self._rows.send(flight.out.detach())
        return flight

    def _backward(self, flight: Flight, part: int) -> None:
        gradient = flight.backward(None if self._place.ends(part) else self._gradients.receive())
        if gradient is not None:
            self._gradients.send(gradient)
