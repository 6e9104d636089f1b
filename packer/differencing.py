"""Largest differencing (Karmarkar & Karp 1982) into any number of parts.

Every item starts as a partition of its own, with one sum that is not zero. The two partitions whose sums differ most
are combined again and again, the largest sum of one with the smallest of the other, until one partition is left. Only
differences matter, so the smallest sum is taken off all.

A partition lists only its sums that have items; together they never number more than the items do, so that memory is
O(items + parts), where lists of `parts` sums need O(items × parts). Knows no limits on counts or tokens.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array

FEW = 8


class Sums(NamedTuple):
    """Sums are named by their first item. value: the sum. lower: the next lower sum of the same partition. last: its
    last item. next_item: the item after this one in the same sum. All int64 [N]."""

    value: Int64Array
    lower: Int64Array
    last: Int64Array
    next_item: Int64Array


@jit
def largest_differencing(costs: Int64Array, parts: int) -> Int64Array:
    """The part of each item, part 0 the heaviest. Of equal spreads the older partition is combined first, single items
    being the oldest, in index order."""
    items = len(costs)
    part_of = np.zeros(items, np.int64)
    if parts == 1 or items == 0:
        return part_of
    own = np.arange(items)
    sums = Sums(costs.copy(), np.full(items, -1, np.int64), own.copy(), np.full(items, -1, np.int64))
    top, count = own.copy(), np.ones(items, np.int64)  # of each partition: its highest sum, and how many it has
    scratch = np.empty((2, 2 * parts), np.int64)
    heap = [(-costs[item], item, item) for item in range(items)]
    heapify(heap)
    for age in range(items, 2 * items - 1):
        first, second = heappop(heap)[2], heappop(heap)[2]
        top[first], count[first] = _combine(sums, top[first], count[first], top[second], count[second], parts, scratch)
        heappush(heap, (-sums.value[top[first]], age, first))
    _number(sums, top[heap[0][2]], part_of)
    return part_of


@jit
def _combine(
    sums: Sums, top_a: int, count_a: int, top_b: int, count_b: int, parts: int, scratch: Int64Array
) -> tuple[int, int]:
    """Combine two partitions; returns the highest sum and the number of sums of the new one."""
    a, b = scratch[0], scratch[1]
    _collect(sums, top_a, a)
    _collect(sums, top_b, b)
    for at in range(max(parts - count_b, 0), count_a):  # with fewer sums in all than parts, none meets another
        _join(sums, a[at], b[parts - 1 - at])
    alone = min(count_b, parts - count_a)
    a[count_a : count_a + alone] = b[:alone]
    count = count_a + alone
    _sort(a[:count], sums.value, count_b)
    _link(sums, a[:count], sums.value[a[count - 1]] if count == parts else 0)
    return a[0], count


@jit
def _collect(sums: Sums, top: int, into: Int64Array) -> None:
    at = 0
    while top >= 0:
        into[at] = top
        top = sums.lower[top]
        at += 1


@jit
def _join(sums: Sums, a: int, b: int) -> None:
    """Add sum b to sum a, and its items."""
    sums.value[a] += sums.value[b]
    sums.next_item[sums.last[a]] = b
    sums.last[a] = sums.last[b]


@jit
def _sort(names: Int64Array, value: Int64Array, added: int) -> None:
    """From the highest sum to the lowest; by insertion where only a few are out of place."""
    if added > FEW:
        names[:] = names[np.argsort(-value[names], kind="mergesort")]
        return
    for at in range(1, len(names)):
        name = names[at]
        while at > 0 and value[names[at - 1]] < value[name]:
            names[at] = names[at - 1]
            at -= 1
        names[at] = name


@jit
def _link(sums: Sums, names: Int64Array, smallest: int) -> None:
    """Make a list of sorted sums, and take off all what even the smallest has."""
    for at in range(len(names)):
        sums.value[names[at]] -= smallest
        sums.lower[names[at]] = names[at + 1] if at + 1 < len(names) else -1


@jit
def _number(sums: Sums, top: int, part_of: Int64Array) -> None:
    part = 0
    while top >= 0:
        item = top
        while item >= 0:
            part_of[item] = part
            item = sums.next_item[item]
        top = sums.lower[top]
        part += 1
