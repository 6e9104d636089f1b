"""Balance without rings, as verl does it: Karmarkar and Karp's differencing over ranks, whole documents only.

In: lengths of at most the capacity, a mesh, a cost model. Out: an `Assignment`. Documents are spread over ranks by
largest differencing of their costs, with any number on each; a rank's documents are packed into micro-batches by best
fit. verl also splits a rank's documents by differencing, which may break the capacity, and gives ranks equal numbers
of samples and of micro-batches; neither is done here, which is in its favour.

A document over the capacity is refused. `cut` makes what one could train on instead: segments that do not see each
other. They are less work than the documents were, so that only plans of the same segments can be compared.
"""

from __future__ import annotations

import numpy as np

from seqmesh.benchmarks.baselines.placement import Placement, packs_of
from seqmesh.packer.balance import partition
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.plan import Assignment, Mesh


def differencing(lengths: Int64Array, mesh: Mesh, cost: CostModel) -> Assignment:
    """Raises ValueError for a document over the capacity."""
    if (longest := int(lengths.max())) > mesh.capacity:
        raise ValueError(f"a document of {longest} tokens is over the capacity, {mesh.capacity}: it has no ring here")
    rank_of = partition(cost.of(lengths), mesh.ranks, method="differencing").part_of
    placement = Placement()
    for rank in range(mesh.ranks):
        for wave, pack in enumerate(packs_of(lengths, np.flatnonzero(rank_of == rank), mesh.capacity)):
            placement.put(pack, (rank,), wave)
    return placement.assignment()


def cut(lengths: Int64Array, capacity: int) -> Int64Array:
    """Every document in segments of the capacity and a rest."""
    counts = -(-lengths // capacity)
    segments = np.full(int(counts.sum()), capacity, np.int64)
    segments[np.cumsum(counts) - 1] = lengths - (counts - 1) * capacity
    return segments
