"""How long a step takes, and how long it must take at least: two pieces of code that share nothing but the costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqmesh.packer.cost import CostModel
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import smallest_rings


def timeline(
    *,
    ranks: int,
    barrier: bool,
    rank: Int64Array,
    wave: Int64Array,
    document: Int64Array,
    ring_size: Int64Array,
    costs: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """When the micro-batch of each piece of a plan begins and ends [P], by event simulation.

    Pieces are sorted by rank, then wave. A rank works through its micro-batches in the order of waves. Micro-batches
    with pieces of one ring exchange keys and values in every layer, so they begin when the last of them is reached and
    keep pace with the dearest of them; so do all that are connected through rings. With `barrier` no rank begins a
    wave before all have ended the one before.
    """
    batches = micro_batches(rank=rank, wave=wave, document=document, ring_size=ring_size, costs=costs)
    begins, ends = np.empty((2, len(batches.first)), np.int64)
    clock = np.zeros(ranks, np.int64)
    first = batches.first
    _simulate(clock, barrier, batches.order, rank[first], wave[first], batches.group, batches.times, begins, ends)
    return begins[batches.of_piece], ends[batches.of_piece]


class MicroBatches(NamedTuple):
    """Of B micro-batches: first [B], their first pieces; times [B], the sum of their pieces' costs; group [B], named by
    its first one, those that are connected through rings; order [B] sorts them by wave and group. of_piece [P]."""

    first: Int64Array
    times: Int64Array
    group: Int64Array
    order: Int64Array
    of_piece: Int64Array


def micro_batches(
    *, rank: Int64Array, wave: Int64Array, document: Int64Array, ring_size: Int64Array, costs: Int64Array
) -> MicroBatches:
    """The micro-batches of pieces that are sorted by rank and wave."""
    first = first_of_batches(rank, wave)
    of_piece = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(rank))))
    on_rings = np.flatnonzero(ring_size > 1)
    on_rings = on_rings[np.argsort(document[on_rings], kind="stable")]
    group = _connect(len(first), document[on_rings], of_piece[on_rings])
    return MicroBatches(
        first=first,
        times=np.add.reduceat(costs, first) if len(rank) else costs,
        group=group,
        order=np.lexsort((group, wave[first])),
        of_piece=of_piece,
    )


def first_of_batches(rank: Int64Array, wave: Int64Array) -> Int64Array:
    """The first piece of each micro-batch, of pieces that are sorted by rank and wave."""
    if not len(rank):
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.append(True, (rank[1:] != rank[:-1]) | (wave[1:] != wave[:-1])))


@jit
def _connect(batches: int, document: Int64Array, batch: Int64Array) -> Int64Array:
    """The group of each micro-batch, named by its first one; those with pieces of one document are in one group. Takes
    the pieces of rings, sorted by document."""
    group = np.arange(batches)
    for piece in range(1, len(document)):
        if document[piece] == document[piece - 1]:
            a, b = _root(group, batch[piece - 1]), _root(group, batch[piece])
            group[max(a, b)] = min(a, b)
    for each in range(batches):
        group[each] = _root(group, each)
    return group


@jit
def _root(group: Int64Array, at: int) -> int:
    while group[at] != at:
        group[at] = group[group[at]]
        at = group[at]
    return at


@jit
def _simulate(
    clock: Int64Array,
    barrier: bool,
    order: Int64Array,
    rank: Int64Array,
    wave: Int64Array,
    group: Int64Array,
    times: Int64Array,
    begins: Int64Array,
    ends: Int64Array,
) -> None:
    """Fill when each micro-batch begins and ends; `order` sorts them by wave and group."""
    at = 0
    while at < len(order):
        if barrier and at > 0 and wave[order[at]] != wave[order[at - 1]]:
            clock[:] = clock.max()
        last, begin, longest = at, 0, 0
        while last < len(order) and group[order[last]] == group[order[at]]:
            begin, longest = max(begin, clock[rank[order[last]]]), max(longest, times[order[last]])
            last += 1
        for batch in order[at:last]:
            begins[batch], ends[batch] = begin, begin + longest
            clock[rank[batch]] = begin + longest
        at = last


def lower_bound(
    lengths: Int64Array, ranks: int, capacity: int, cost: CostModel, *, per_node: int, barrier: bool
) -> int:
    """No plan is faster, whatever rings it uses.

    The most of: all work and the fixed costs of as few micro-batches as hold all tokens, spread evenly (with `barrier`
    every rank has as many micro-batches as the one with most); and the longest document, on the best ring there is for
    it, its traffic hidden by nothing but its own attention.
    """
    if len(lengths) == 0:
        return 0
    micro_batches = -(-int(lengths.sum()) // capacity)
    if barrier:
        micro_batches = -(-micro_batches // ranks) * ranks
    even = -(-(int(cost.of(lengths).sum()) + cost.fixed * micro_batches) // ranks)
    return max(even, _longest_alone(int(lengths.max()), ranks, capacity, cost, per_node))


def _longest_alone(longest: int, ranks: int, capacity: int, cost: CostModel, per_node: int) -> int:
    """Time of the first member of the best ring for the longest document, over all ring sizes that hold it."""
    length = np.array([longest])
    sizes = np.arange(min(int(smallest_rings(length, capacity)[0]), ranks), ranks + 1)
    lengths, first = np.full(len(sizes), longest), np.zeros(len(sizes), np.int64)
    return cost.fixed + int(cost.alone(lengths, sizes, first, per_node).min())
