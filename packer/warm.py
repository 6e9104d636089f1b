"""Compile the routines of this package before they are wanted.

The first call of a routine compiles it, which takes seconds, or loads it from numba's cache on the disk. `warmup()`
does that for all of them, by calling each public routine on a few numbers; nothing else is kept or changed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import product

import numpy as np

from seqmesh.packer import balance, bins
from seqmesh.packer.blocks import block_permutation
from seqmesh.packer.cost import CostModel
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.online import OnlinePacker
from seqmesh.packer.permute import mix64, permute
from seqmesh.packer.plan import Mesh
from seqmesh.packer.rooms import LARGEST_INDEX
from seqmesh.packer.rows import plan_rows

CAPACITY = 8
LENGTHS = (5, 4, 3, 3, 3)  # longest first leaves them uneven over two parts: there is something to refine
FAR_APART = (LARGEST_INDEX + 1, 1)  # too long for tables with an entry for each length


def warmup() -> float:
    """Make every routine of the package ready for use; returns the seconds that took."""
    started = time.perf_counter()
    _pack(LENGTHS)
    _partition(LENGTHS)
    OnlinePacker(CAPACITY).push(LENGTHS)
    for method in bins.METHODS:
        bins.pack(FAR_APART, 2 * LARGEST_INDEX, method=method)
    balance.partition(FAR_APART, 2)
    _plan()
    plan_rows(LENGTHS, CAPACITY, rows_per_step=2)
    permute(0, 1, mix64(0))
    block_permutation(np.arange(3), window=1, key=0)
    return time.perf_counter() - started


def _pack(lengths: tuple[int, ...]) -> None:
    """All methods, with all limits, in either order; and the pieces of each bin."""
    for method, seed in product(bins.METHODS, (None, 0)):
        bins.pack(lengths, CAPACITY, method=method, seed=seed, bins_multiple=4).pieces(0)
    for method in bins.WHOLE:
        bins.pack(lengths, CAPACITY, method=method, extra=(1,) * len(lengths), extra_capacity=3)
    bins.pack(lengths, CAPACITY - 4, overlong="drop").pieces(0)


def _partition(lengths: tuple[int, ...]) -> None:
    """All methods without limits, with equal counts and with a capacity that holds everything or too little."""
    for method in balance.METHODS:
        balance.partition(lengths, 2, method=method)
    balance.partition(lengths, 2, equal_counts=True)
    for capacity in (CAPACITY, CAPACITY - 3):
        with suppress(ValueError):  # three of 3 tokens do not fit two parts of 5, which only the last resort finds
            balance.partition(lengths, 2, tokens=(3, 3, 3, 0, 0), capacity=capacity)


def _plan() -> None:
    """A document on a ring of two, and one that is whole, in every mode; a ring over two nodes."""
    for mesh in (
        Mesh(ranks=2, capacity=CAPACITY),
        Mesh(ranks=2, capacity=CAPACITY, mode="waves"),
        Mesh(ranks=2, capacity=CAPACITY, stages=2),
        Mesh(ranks=2, capacity=CAPACITY, ranks_per_node=1),
    ):
        plan_step((CAPACITY + 2, 1), mesh, CostModel())
