"""How well an order is shuffled: how far apart in the input those are that come one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqmesh.packer.lengths import Int64Array

FEWEST = 16  # pairs that a mean is taken of, where there are so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Mean distance in the input of items that are neighbours in the order, in parts of the number of items: 0 for the
    order of the input, 1/3 to expect of a perfect shuffle of many. Of all of them, and of the first, the middle and the
    last percent. kept: the share of neighbours that are neighbours in the input, too."""

    overall: float
    first: float
    middle: float
    last: float
    kept: float


def neighbours(order: Int64Array) -> Neighbours:
    """order [D]: the places in the input, 0 to D − 1, in any order. Raises ValueError for fewer than two."""
    if len(order) < 2:
        raise ValueError(f"the order has {len(order)} items: neighbours need two")
    apart = np.abs(np.diff(order))
    percent = min(max(len(apart) // 100, FEWEST), len(apart))
    middle = (len(apart) - percent) // 2

    def mean(start: int, count: int) -> float:
        return float(apart[start : start + count].mean()) / len(order)

    return Neighbours(
        overall=mean(0, len(apart)),
        first=mean(0, percent),
        middle=mean(middle, percent),
        last=mean(len(apart) - percent, percent),
        kept=float(np.count_nonzero(apart == 1)) / len(apart),
    )
