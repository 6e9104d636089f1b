"""Parameters of a model end to end in one buffer, and where to cut it into shards.

Matrices come first, then vectors, so that a shard is at most one stretch of each. Cuts lie between rows: a rank has
whole rows of every parameter. Each parameter begins at a multiple of ALIGN elements, as kernels like it; what is
between two is zero and stays so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGN = 32  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter's place: elements [start, start + shape.numel()), in the buffer's room up to `end`. number: of the
    parameter in the model."""

    name: str
    number: int
    shape: torch.Size
    start: int
    end: int

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


def lay_out(model: nn.Module) -> list[Slot]:
    """A place for every parameter, in the buffer's order. Raises ValueError where they are of several dtypes."""
    named = list(model.named_parameters())
    first = named[0][1]
    if mixed := {p.dtype for _, p in named} - {first.dtype}:
        raise ValueError(f"parameters are {first.dtype} and {mixed}: must be of one dtype")
    slots: list[Slot] = []
    end = 0
    for number, (name, p) in sorted(enumerate(named), key=lambda item: item[1][1].ndim <= 1):
        start, end = end, end - -p.numel() // ALIGN * ALIGN
        slots.append(Slot(name=name, number=number, shape=p.shape, start=start, end=end))
    return slots


def cuts(slots: Sequence[Slot], ranks: int) -> list[int]:
    """[ranks + 1] where each rank's shard begins, and the last one ends: at the row nearest to an even share."""
    return [0, *(_nearest_row(slots, slots[-1].end * rank // ranks) for rank in range(1, ranks)), slots[-1].end]


def _nearest_row(slots: Sequence[Slot], element: int) -> int:
    slot = slots[bisect_right([slot.start for slot in slots], element) - 1]
    cut = slot.start + (element - slot.start + slot.row // 2) // slot.row * slot.row
    return cut if cut < slot.used else slot.end
