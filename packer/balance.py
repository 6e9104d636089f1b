"""Balancing: which part (rank) gets which item, so that the heaviest part is as light as can be.

Longest processing time first (Graham 1969): items from the dearest to the cheapest, each to the least loaded part;
the heaviest part is at most 4/3 − 1/(3·parts) of the optimum. Items are not split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seqmesh.packer.bins import descending
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array, as_lengths, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """part_of [N]: the part of each item. loads [parts]: summed cost. lower_bound: no partition's heaviest is less."""

    part_of: Int64Array
    loads: Int64Array
    lower_bound: int

    @property
    def imbalance(self) -> float:
        """Heaviest part over the mean part, 1.0 where all are equal (and where there is no cost)."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0


def partition(costs: npt.ArrayLike, parts: int) -> Partition:
    """Spread items over `parts`; deterministic, ties go to the lowest part.

    Raises ValueError for fewer than one part, for a cost that is no integer or negative, or for a sum over 2**62.
    """
    checked = as_lengths(costs, name="costs")
    if parts < 1:
        raise ValueError(f"parts is {parts}: must be at least 1")
    everything = total(checked, "costs")
    part_of, loads = spread(checked, np.zeros(parts, np.int64))
    dearest = int(checked.max()) if len(checked) else 0
    return Partition(part_of=part_of, loads=loads, lower_bound=max(-(-everything // parts), dearest))


def spread(costs: Int64Array, loads: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Longest first onto parts that carry `loads` already: the part of each item, and the loads afterwards."""
    part_of = np.empty(len(costs), np.int64)
    after = loads.copy()
    _longest_first(costs, descending(costs), after, part_of)
    return part_of, after


@jit
def _longest_first(costs: Int64Array, dearest_first: Int64Array, loads: Int64Array, part_of: Int64Array) -> None:
    """Fill `loads` and `part_of`. `heap` holds the parts, the least loaded (then the lowest) at its root."""
    heap = np.argsort(loads, kind="mergesort")  # a sorted list is a heap
    for item in dearest_first:
        part = heap[0]
        part_of[item] = part
        loads[part] += costs[item]
        _sift_down(heap, loads)


@jit
def _sift_down(heap: Int64Array, loads: Int64Array) -> None:
    """Put the root, whose load has grown, where it belongs."""
    moving = heap[0]
    at = 0
    while 2 * at + 1 < len(heap):
        child = 2 * at + 1
        if child + 1 < len(heap) and _lighter(loads, heap[child + 1], heap[child]):
            child += 1
        if _lighter(loads, moving, heap[child]):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moving


@jit
def _lighter(loads: Int64Array, a: int, b: int) -> bool:
    return loads[a] < loads[b] or (loads[a] == loads[b] and a < b)
