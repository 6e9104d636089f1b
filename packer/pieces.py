"""How a document is spread over a ring: which tokens each member holds. Never any padding.

A document of L tokens on a ring of D ranks is cut into 2·D chunks; chunk c is [c·L // 2D, (c + 1)·L // 2D). Member i
holds chunks i and 2D − 1 − i: with causal attention the early one is cheap and the late one dear, so every member has
about the same work. A ring of one holds the whole document. All functions take int64 arrays or plain integers.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from seqmesh.packer.lengths import Int64Array

T = TypeVar("T", int, Int64Array)


def chunk_start(length: T, ring_size: T, chunk: T) -> T:
    """First token of a chunk; that of chunk 2 · ring_size is the document's length."""
    return chunk * length // (2 * ring_size)


def chunk_sizes(length: int, ring_size: int) -> tuple[int, ...]:
    """Tokens of all 2 · ring_size chunks."""
    starts = [chunk_start(length, ring_size, chunk) for chunk in range(2 * ring_size + 1)]
    return tuple(stop - start for start, stop in zip(starts, starts[1:], strict=False))


def piece_ranges(length: T, ring_size: T, index: T) -> tuple[tuple[T, T], tuple[T, T]]:
    """The two token ranges [start, stop) of member `index`: its early chunk, then its late one."""
    mirror = 2 * ring_size - 1 - index
    early = chunk_start(length, ring_size, index), chunk_start(length, ring_size, index + 1)
    late = chunk_start(length, ring_size, mirror), chunk_start(length, ring_size, mirror + 1)
    return early, late


def piece_tokens(length: T, ring_size: T, index: T) -> T:
    """Tokens that member `index` holds."""
    (a, b), (c, d) = piece_ranges(length, ring_size, index)
    return b - a + d - c


def piece_pairs(length: T, ring_size: T, index: T) -> T:
    """(query, key) pairs that causal attention computes for the queries of member `index`, exact: the token at position
    p attends to p + 1 keys."""
    (a, b), (c, d) = piece_ranges(length, ring_size, index)
    return (b * (b + 1) - a * (a + 1) + d * (d + 1) - c * (c + 1)) // 2


def largest_document(ranks: int, capacity: int) -> int:
    """Every document of at most this many tokens fits a ring of `ranks` with `capacity` tokens on each.

    A chunk has at most ⌈L / 2D⌉ tokens, so two of them fit whenever L ≤ 2D · ⌊capacity / 2⌋.
    """
    return capacity if ranks == 1 else 2 * ranks * (capacity // 2)


def smallest_rings(lengths: Int64Array, capacity: int) -> Int64Array:
    """The smallest ring for each document whose every piece is at most `capacity` (at least 2 for documents over it)."""
    ring = np.maximum(-(-lengths // capacity), 1)
    while True:
        over = np.flatnonzero(_largest_piece(lengths, ring) > capacity)
        if len(over) == 0:
            return ring
        ring[over] += 1  # the two chunks of a piece were rounded up together: one rank more is always enough of them


def _largest_piece(lengths: Int64Array, ring: Int64Array) -> Int64Array:
    """Tokens of the largest piece of each document: at most twice the largest chunk, exact for the rings that matter."""
    exact = np.where(ring == 1, lengths, 0)
    for document in np.flatnonzero(ring > 1):
        size, length = int(ring[document]), int(lengths[document])
        index = np.arange(size, dtype=np.int64)
        exact[document] = piece_tokens(np.full(size, length), np.full(size, size), index).max()
    return exact
