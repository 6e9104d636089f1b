"""How long a step takes, and how long it must take at least: two pieces of code that share nothing but the costs."""

from __future__ import annotations

import numpy as np

from seqmesh.packer.cost import CostModel
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array


def makespan(
    *,
    ranks: int,
    barrier: bool,
    rank: Int64Array,
    wave: Int64Array,
    document: Int64Array,
    ring_size: Int64Array,
    costs: Int64Array,
) -> int:
    """Finish time of the last rank, by event simulation over the pieces of a plan.

    A rank works through its waves in order, in each the rings and then the documents that are whole. A ring starts when
    its last member arrives. With `barrier` no rank begins a wave before all have ended the one before.
    """
    order = np.lexsort((rank, document, ring_size == 1, wave))
    clock = np.zeros(ranks, np.int64)
    _simulate(clock, barrier, rank[order], wave[order], ring_size[order], costs[order])
    return int(clock.max())


@jit
def _simulate(
    clock: Int64Array, barrier: bool, rank: Int64Array, wave: Int64Array, ring_size: Int64Array, costs: Int64Array
) -> None:
    """Advance each rank's clock over pieces sorted by wave, rings first, document."""
    piece = 0
    while piece < len(rank):
        if barrier and piece > 0 and wave[piece] != wave[piece - 1]:
            clock[:] = clock.max()
        members = rank[piece : piece + ring_size[piece]]
        start = 0
        for member in members:
            start = max(start, clock[member])
        for offset in range(len(members)):
            clock[members[offset]] = start + costs[piece + offset]
        piece += ring_size[piece]


def lower_bound(lengths: Int64Array, ranks: int, cost: CostModel) -> int:
    """No plan is faster, whatever rings it uses: all work spread evenly, and the last token of each document, which
    attends to all of it, on one rank."""
    if len(lengths) == 0:
        return 0
    longest = int(lengths.max())
    even = -(-int(cost.of(lengths).sum()) // ranks)
    return max(even, cost.fixed + min(longest, 1) * (cost.linear + cost.quadratic * longest))
