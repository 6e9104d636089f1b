"""Rings on ranks: which ranks share each document that is spread, and in which order.

Rings are taken the widest first and put on the ranks that are free the earliest, inside one node where they fit, on as
few whole nodes as hold them where not. A ring begins when its last member is free, so ranks that are free at about the
same time belong together. The ranks of a node are kept sorted by when they are free, and so are nodes while rings wider
than a node are placed.
"""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array

NEVER = np.iinfo(np.int64).max


@jit
def place_rings(
    widths: Int64Array, heights: Int64Array, ranks: int, per_node: int, offsets: Int64Array, members: Int64Array
) -> Int64Array:
    """Fill `members` [sum of widths] with the ranks of each ring, ascending; returns when each ring begins.

    Rings come the widest first. heights: how long each keeps its members busy. Those of ring q are
    members[offsets[q]:offsets[q + 1]].
    """
    nodes = -(-ranks // per_node)
    free_at = np.zeros((per_node, nodes), np.int64)  # column n: node n's ranks, the earliest first
    who = np.empty((per_node, nodes), np.int64)
    for rank in range(per_node * nodes):
        who[rank % per_node, rank // per_node] = rank
        if rank >= ranks:
            free_at[rank % per_node, rank // per_node] = NEVER
    by_time = np.arange(nodes)
    starts = np.empty(len(widths), np.int64)
    for ring in range(len(widths)):
        mine = members[offsets[ring] : offsets[ring + 1]]
        if widths[ring] > per_node:
            starts[ring] = _on_nodes(free_at, who, by_time, heights[ring], mine)
        else:
            node = int(np.argmin(free_at[widths[ring] - 1]))
            starts[ring] = free_at[widths[ring] - 1, node]
            mine[:] = _occupy(free_at, who, node, widths[ring], starts[ring] + heights[ring])
        mine.sort()
    return starts


@jit
def _on_nodes(free_at: Int64Array, who: Int64Array, by_time: Int64Array, height: int, mine: Int64Array) -> int:
    """A ring over whole nodes and a part of one more: those that are all free the earliest."""
    per_node = len(free_at)
    start, taken, at = 0, 0, 0
    while taken < len(mine):
        count = min(len(mine) - taken, per_node)
        while free_at[count - 1, by_time[at]] == NEVER:  # a last node with fewer ranks
            at += 1
        start = max(start, free_at[count - 1, by_time[at]])
        taken += count
        at += 1
    taken, last = 0, at
    for at in range(last):
        node = by_time[at]
        count = min(len(mine) - taken, per_node)
        if count and free_at[count - 1, node] != NEVER:
            mine[taken : taken + count] = _occupy(free_at, who, node, count, start + height)
            taken += count
    by_time[:] = by_time[np.argsort(free_at[per_node - 1][by_time], kind="mergesort")]
    return start


@jit
def _occupy(free_at: Int64Array, who: Int64Array, node: int, count: int, until: int) -> Int64Array:
    """Take the node's first ranks, which are free again at `until`; returns them."""
    per_node = len(free_at)
    chosen = who[:count, node].copy()
    at = count
    while at < per_node and free_at[at, node] < until:
        free_at[at - count, node], who[at - count, node] = free_at[at, node], who[at, node]
        at += 1
    for i in range(count):
        free_at[at - count + i, node], who[at - count + i, node] = until, chosen[i]
    return chosen
