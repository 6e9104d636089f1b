"""Mode `free`: ranks differ in their number of micro-batches, and wait for each other only where they share a ring.

Rings are placed first, the widest on the ranks that are free the earliest (`skyline`). Whole documents then even out
the work of all ranks, and fill the time in which a rank waits for a ring (`timeline`). What cannot be filled counts as
work in a second round, which moves whole documents to ranks that wait less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqmesh.packer.balance import spread
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.plan import Assignment, Mesh
from seqmesh.packer.skyline import place_rings
from seqmesh.packer.sorting import ascending_by
from seqmesh.packer.timeline import arrange

ROUNDS = 2


class Rings(NamedTuple):
    """Documents that are spread, in the order in which they are placed: document, width (ring size), height (how long
    it keeps a rank busy), and where its members begin among all."""

    document: Int64Array
    width: Int64Array
    height: Int64Array
    offsets: Int64Array


def place(lengths: Int64Array, sizes: Int64Array, mesh: Mesh, cost: CostModel) -> Assignment:
    """Rank and wave of every piece, for rings of these sizes [D]."""
    rings = _rings(lengths, sizes, mesh, cost)
    members = np.empty(rings.offsets[-1], np.int64)
    starts = place_rings(rings.width, rings.height, mesh.ranks, mesh.node, rings.offsets, members)
    busy = np.zeros(mesh.ranks, np.int64)
    np.add.at(busy, members, np.repeat(rings.height, rings.width))
    whole = np.flatnonzero(sizes == 1)
    costs = cost.of(lengths[whole])
    waits = np.zeros(mesh.ranks, np.int64)
    ring_wave, wave = np.empty(len(rings.width), np.int64), np.empty(len(whole), np.int64)
    for _ in range(ROUNDS):
        rank, _loads = spread(costs, busy + waits)
        order = ascending_by(rank, int(costs.max(initial=0)) - costs)
        waits = arrange(
            mesh.capacity,
            cost.fixed,
            rings.offsets,
            members,
            rings.height,
            starts,
            np.searchsorted(rank[order], np.arange(mesh.ranks + 1)),
            lengths[whole[order]],
            costs[order],
            ring_wave,
            wave,
        )
    index = np.arange(len(members)) - np.repeat(rings.offsets[:-1], rings.width)
    return Assignment(
        rings=sizes,
        document=np.concatenate([np.repeat(rings.document, rings.width), whole[order]]),
        index=np.concatenate([index, np.zeros_like(whole)]),
        rank=np.concatenate([members, rank[order]]),
        wave=np.concatenate([np.repeat(ring_wave, rings.width), wave]),
    )


def _rings(lengths: Int64Array, sizes: Int64Array, mesh: Mesh, cost: CostModel) -> Rings:
    """The documents that are spread, the widest and then the dearest first."""
    document = np.flatnonzero(sizes > 1)
    width, whole, first = sizes[document], lengths[document], np.zeros(len(document), np.int64)
    height = cost.fixed + cost.alone(whole, width, first, mesh.node)
    order = np.lexsort((document, -height, -width))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(width[order])])
    return Rings(document[order], width[order], height[order], offsets)
