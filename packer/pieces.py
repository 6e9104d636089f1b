"""How a document is spread over a ring: which tokens each member holds. Never any padding.

A document of L tokens on a ring of D ranks is cut into 2·D chunks; chunk c is [c·L // 2D, (c + 1)·L // 2D). Member i
holds chunks i and 2D − 1 − i: with causal attention the early one is cheap and the late one dear, so every member has
about the same work. A ring of one holds the whole document. All functions take int64 arrays or plain integers.
"""

from __future__ import annotations

from itertools import pairwise
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
    return tuple(stop - start for start, stop in pairwise(starts))


def piece_ranges(length: T, ring_size: T, index: T) -> tuple[tuple[T, T], tuple[T, T]]:
    """The two token ranges [start, stop) of member `index`: its early chunk, then its late one."""
    mirror = 2 * ring_size - 1 - index
    early = chunk_start(length, ring_size, index), chunk_start(length, ring_size, index + 1)
    late = chunk_start(length, ring_size, mirror), chunk_start(length, ring_size, mirror + 1)
    return early, late


def piece_tokens(length: T, ring_size: T, index: T) -> T:
    """Tokens that member `index` holds."""
    (a, b), (c, d) = piece_ranges(length, ring_size, index)
    tokens: T = b - a + d - c
    return tokens


def piece_pairs(length: T, ring_size: T, index: T) -> T:
    """(query, key) pairs that causal attention computes for the queries of member `index`, exact: the token at position
    p attends to p + 1 keys."""
    (a, b), (c, d) = piece_ranges(length, ring_size, index)
    pairs: T = (b * (b + 1) - a * (a + 1) + d * (d + 1) - c * (c + 1)) // 2
    return pairs


def rows_sent(length: T, ring_size: T) -> T:
    """Rows of keys and values that a ring's members send each other for one causal attention, all together: each member
    gets every key that it sees and does not hold, once. Chunk j is seen by all, chunk 2D − 1 − j by the j members
    below. The backward pass sends as many again, and as many gradients.
    """
    rows: T = length * 0
    for owner in range(int(np.max(ring_size, initial=1))):
        (a, b), (c, d) = piece_ranges(length, ring_size, length * 0 + owner)
        rows = rows + (owner < ring_size) * ((ring_size - 1) * (b - a) + owner * (d - c))
    return rows


def largest_document(ranks: int, capacity: int) -> int:
    """Every document of at most this many tokens fits a ring of `ranks` with `capacity` tokens on each.

    A chunk has at most ⌈L / 2D⌉ tokens, so two of them fit whenever L ≤ 2D · ⌊capacity / 2⌋.
    """
    return capacity if ranks == 1 else 2 * ranks * (capacity // 2)


def smallest_rings(lengths: Int64Array, capacity: int) -> Int64Array:
    """The smallest ring of each document that leaves no member with more than `capacity` tokens."""
    rings = np.maximum(-(-lengths // capacity), 1)
    for document in np.flatnonzero(rings > 1):
        while _largest_piece(int(lengths[document]), int(rings[document])) > capacity:
            rings[document] += 1  # both chunks of a piece had been rounded up
    return rings


def _largest_piece(length: int, ring_size: int) -> int:
    """Tokens of a document's largest piece."""
    index = np.arange(ring_size, dtype=np.int64)
    return int(piece_tokens(np.full_like(index, length), np.full_like(index, ring_size), index).max())
