"""Parameters of a model end to end in one buffer, and where to cut it into shards.

What tensor peers divide comes first, then what each of them has whole (`common`); in both, matrices come before
vectors, so that a shard is at most one stretch of each. Cuts lie between rows: a rank has whole rows of every
parameter. Each parameter begins at a multiple of ALIGN elements, as kernels like it; what is between two is zero and
stays so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmesh.trainer.replicas.held import Held

ALIGN = 32  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter's place: elements [start, start + shape.numel()), in the buffer's room up to `end`."""

    held: Held
    start: int
    end: int

    @property
    def shape(self) -> torch.Size:
        """Of what is here."""
        return self.held.parameter.shape

    @property
    def row(self) -> int:
        """Elements of a row; a tensor of no dimensions is one."""
        return self.shape[1:].numel()

    @property
    def used(self) -> int:
        """Where its elements end."""
        return self.start + self.shape.numel()

    def rows(self, low: int, high: int) -> tuple[int, int]:
        """First row and number of rows that lie in [low, high), which cuts no row."""
        begin, end = (min(max(cut, self.start), self.used) for cut in (low, high))
        return ((begin - self.start) // self.row, (end - begin) // self.row) if end > begin else (0, 0)

    def of(self, buffer: Tensor) -> Tensor:
        """Its view of a buffer of all."""
        return buffer[self.start : self.used].view(self.shape)


def lay_out(held: Sequence[Held]) -> list[Slot]:
    """A place for every parameter, in the buffer's order. Raises ValueError where they are of several dtypes."""
    first = held[0].parameter.dtype
    if mixed := {each.parameter.dtype for each in held} - {first}:
        raise ValueError(f"parameters are {first} and {mixed}: must be of one dtype")
    slots: list[Slot] = []
    end = 0
    for each in sorted(held, key=lambda each: (each.common, each.parameter.ndim <= 1)):
        start, end = end, end - -each.parameter.numel() // ALIGN * ALIGN
        slots.append(Slot(held=each, start=start, end=end))
    return slots


def common_begin(slots: Sequence[Slot]) -> int:
    """Where what tensor peers have in common begins."""
    return next((slot.start for slot in slots if slot.held.common), end_of(slots))


def end_of(slots: Sequence[Slot]) -> int:
    """Where the last one's room ends."""
    return slots[-1].end if slots else 0


def cuts(slots: Sequence[Slot], ranks: int) -> list[int]:
    """[ranks + 1] where each rank's shard begins, and the last one ends: at the row nearest to an even share."""
    end = end_of(slots)
    return [0, *(_nearest_row(slots, end * rank // ranks) for rank in range(1, ranks)), end]


def _nearest_row(slots: Sequence[Slot], element: int) -> int:
    slot = slots[bisect_right([slot.start for slot in slots], element) - 1]
    cut = slot.start + (element - slot.start + slot.row // 2) // slot.row * slot.row
    return cut if cut < slot.used else slot.end
