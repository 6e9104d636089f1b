"""Pieces by bin (CSR), and more bins out of those that hold the most."""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array


def group(bin_of: Int64Array, met: Int64Array | None, count: int) -> tuple[Int64Array, Int64Array]:
    """order, offsets [count + 1]: pieces of bin b are order[offsets[b]:offsets[b + 1]], in the order in which they were
    `met`; None: all, by index."""
    return _group_all(bin_of, count) if met is None else _group_met(bin_of, met, count)


def share_out(bin_of: Int64Array, met: Int64Array | None, count: int, target: int) -> Int64Array:
    """Bins of the pieces after every other piece of the bins with the most pieces went to new bins, until there are
    `target`. Raises ValueError where one would be empty."""
    bin_of = bin_of.copy()
    while count < target:
        order, offsets = group(bin_of, met, count)
        held = np.diff(offsets)
        donors = np.argsort(-held, kind="stable")[: target - count]
        donors = donors[held[donors] > 1]
        if not len(donors):
            raise ValueError(f"{len(order)} pieces do not make {target} bins without an empty one")
        for donor in donors:
            bin_of[order[offsets[donor] + 1 : offsets[donor + 1] : 2]] = count
            count += 1
    return bin_of


def by_first_piece(bin_of: Int64Array, met: Int64Array | None, count: int) -> Int64Array:
    """Bins of the pieces after the bins, none of them empty, were numbered by their first piece."""
    order, offsets = group(bin_of, met, count)
    place = np.arange(len(bin_of)) if met is None else _places(met, len(bin_of))
    number = np.empty(count, np.int64)
    number[np.argsort(place[order[offsets[:-1]]])] = np.arange(count)
    return np.where(bin_of < 0, -1, number[bin_of])


def _places(met: Int64Array, count: int) -> Int64Array:
    place = np.full(count, -1, np.int64)
    place[met] = np.arange(len(met))
    return place


@jit
def _offsets(bin_of: Int64Array, count: int) -> Int64Array:
    offsets = np.zeros(count + 1, np.int64)
    for chosen in bin_of:
        if chosen >= 0:
            offsets[chosen + 1] += 1
    for i in range(count):
        offsets[i + 1] += offsets[i]
    return offsets


@jit
def _group_all(bin_of: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    offsets = _offsets(bin_of, count)
    order = np.empty(len(bin_of), np.int64)
    free = offsets[:-1].copy()
    for piece in range(len(bin_of)):
        chosen = bin_of[piece]
        order[free[chosen]] = piece
        free[chosen] += 1
    return order, offsets


@jit
def _group_met(bin_of: Int64Array, met: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    offsets = _offsets(bin_of, count)
    order = np.empty(len(met), np.int64)
    free = offsets[:-1].copy()
    for piece in met:
        chosen = bin_of[piece]
        order[free[chosen]] = piece
        free[chosen] += 1
    return order, offsets
