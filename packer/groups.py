"""Pieces by bin (CSR), and more bins out of those that hold the most."""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array

BUCKET_BITS = 10
LOW_WORD = (1 << 32) - 1


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


def _group_all(bin_of: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    """A counting sort by bin. Where there are many bins it goes through buckets of neighbouring bins first, so that no
    pass writes to more places than the caches hold."""
    shift = max((count - 1).bit_length() - BUCKET_BITS, 0)
    starts = np.zeros(((count - 1) >> shift) + 2, np.int64)
    order = np.empty(len(bin_of), np.int64)
    _into_buckets(bin_of, shift, starts, order)
    scratch = np.empty(int(np.diff(starts).max(initial=0)), np.int64)
    offsets = np.zeros(count + 1, np.int64)
    _within_buckets(starts, shift, offsets, order, scratch)
    return order, offsets


@jit
def _into_buckets(bin_of: Int64Array, shift: int, starts: Int64Array, packed: Int64Array) -> None:
    """Fill `starts`, where each bucket of 2**shift bins begins, and `packed` by bucket: bin and piece as one number."""
    for chosen in bin_of:
        starts[(chosen >> shift) + 1] += 1
    for bucket in range(len(starts) - 1):
        starts[bucket + 1] += starts[bucket]
    free = starts[:-1].copy()
    for piece in range(len(bin_of)):
        bucket = bin_of[piece] >> shift
        packed[free[bucket]] = bin_of[piece] << 32 | piece
        free[bucket] += 1


@jit
def _within_buckets(
    starts: Int64Array, shift: int, offsets: Int64Array, order: Int64Array, scratch: Int64Array
) -> None:
    """Sort each bucket by bin, and unpack it."""
    count = len(offsets) - 1
    for bucket in range(len(starts) - 1):
        packed = scratch[: starts[bucket + 1] - starts[bucket]]
        packed[:] = order[starts[bucket] : starts[bucket + 1]]
        first, last = bucket << shift, min((bucket + 1) << shift, count)
        for number in packed:
            offsets[(number >> 32) + 1] += 1
        for chosen in range(first, last):
            offsets[chosen + 1] += offsets[chosen]
        for number in packed:  # each offset moves to the end of its bin, which is where the next one begins
            order[offsets[number >> 32]] = number & LOW_WORD
            offsets[number >> 32] += 1
        for chosen in range(last, first, -1):
            offsets[chosen] = offsets[chosen - 1]
        offsets[first] = starts[bucket]


@jit
def _group_met(bin_of: Int64Array, met: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    offsets = np.zeros(count + 1, np.int64)
    for piece in met:
        offsets[bin_of[piece] + 1] += 1
    for chosen in range(count):
        offsets[chosen + 1] += offsets[chosen]
    order = np.empty(len(met), np.int64)
    free = offsets[:-1].copy()
    for piece in met:
        order[free[bin_of[piece]]] = piece
        free[bin_of[piece]] += 1
    return order, offsets
