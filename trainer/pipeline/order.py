"""In which order a stage of a pipeline does the forwards and backwards of its micro-batches.

Every process takes one endless schedule and leaves out what its replica does not have: micro-batches after its last
one, and empty ones before. S stages with P stretches of layers each, `parts`, are S · P virtual stages; stretch p of
stage s is virtual stage p · S + s. Forward number k of a stage is of part (k // S) % P and of micro-batch
(k // SP) · S + k % S; backwards go through the same micro-batches with the parts from the last to the first. With one
part that is 1F1B, with more the interleaved schedule of Narayanan et al. (SC 2021): a stage does `ahead` forwards, then
one forward and one backward in turn.

Replicas that share documents meet in the same operation of the same stage, whatever else each of them has to do. No two
processes can wait for each other: number the forward k of stage s by 2k + s (of several parts 2k + 2s), and a backward
by one more than the forward that the schedule has before it. The numbers go up along the schedule of a stage, and what
an operation waits for has a smaller one: the same micro-batch on the virtual stage before it, after it in backward, or
its own forward on the last. Members of a ring share micro-batch, part, direction and stage, and so the number. Of all
that is left to do, whatever has the smallest number can begin. And since every message goes from some number to the
next, or the next but one, whatever is sent from one process to another is taken there in the order in which it was
sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Operation(NamedTuple):
    """The forward or backward of one micro-batch through one part of a stage."""

    batch: int
    part: int
    backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A stage, by its number, of a pipeline of so many, each with so many parts."""

    stage: int
    stages: int
    parts: int = 1

    @property
    def ahead(self) -> int:
        """Forwards before the first pair of a forward and a backward. One more is the most that is ever between its
        forward and its backward."""
        left = self.stages - 1 - self.stage
        return left if self.parts == 1 else (self.parts - 1) * self.stages + 2 * left

    def virtual(self, part: int) -> int:
        """The place of a part among all parts of all stages."""
        return part * self.stages + self.stage

    def begins(self, part: int) -> bool:
        """Whether nothing comes before this part."""
        return self.virtual(part) == 0

    def ends(self, part: int) -> bool:
        """Whether nothing comes after this part."""
        return self.virtual(part) == self.stages * self.parts - 1


def operations(present: Sequence[bool], place: Place) -> list[Operation]:
    """All that a stage does in a step, in order. present: of every micro-batch of the replica, whether it holds
    anything."""
    return [each for each in _schedule(len(present), place) if each.batch < len(present) and present[each.batch]]


def _schedule(batches: int, place: Place) -> Iterator[Operation]:
    """The endless schedule as far as there are micro-batches, in whole rounds of as many as there are stages."""
    total = -(-batches // place.stages) * place.stages * place.parts
    for number in range(-place.ahead, total):
        if number + place.ahead < total:
            yield Operation(*_forward(number + place.ahead, place))
        if number >= 0:
            batch, part = _forward(number, place)
            yield Operation(batch, place.parts - 1 - part, backward=True)


def _forward(number: int, place: Place) -> tuple[int, int]:
    turn, within = divmod(number, place.stages)
    turn, part = divmod(turn, place.parts)
    return turn * place.stages + within, part
