"""How a document is spread over a ring: which tokens each member holds. Never any padding.

A document of L tokens on a ring of D ranks is cut into 2·D chunks; chunk c is [c·L // 2D, (c + 1)·L // 2D). Member i
holds chunks i and 2D − 1 − i: with causal attention the early one is cheap and the late one dear, so every member has
about the same work. A ring of one holds the whole document. All functions take int64 arrays or plain integers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import numpy as np

from seqmesh.packer.jit import jit
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


def piece_pairs(length: T, ring_size: T, index: T, window: int | None = None) -> T:
    """(query, key) pairs that causal attention computes for the queries of member `index`, exact: the token at position
    p attends to p + 1 keys, to the last `window` of them where there is one."""
    (a, b), (c, d) = piece_ranges(length, ring_size, index)
    pairs: T = pairs_before(b, window) - pairs_before(a, window) + pairs_before(d, window) - pairs_before(c, window)
    return pairs


def pairs_before(position: T, window: int | None) -> T:
    """Pairs of all queries before a position: for a document's length, all that it has."""
    if window is None:
        return position * (position + 1) // 2
    inside = np.minimum(position, window)
    pairs: T = inside * (inside + 1) // 2 + (position - inside) * window
    return pairs


def piece_rows(length: T, ring_size: T, index: T, window: int | None = None) -> T:
    """Rows of keys and values that member `index` sees and does not hold: what the ring brings it in one attention.

    Without a window it sees everything up to the end of its late chunk. With one, each of its chunks sees `window` − 1
    keys before its start; what lies in its early chunk it holds.
    """
    (a, b), (c, d) = piece_ranges(length, ring_size, index)
    reach = d if window is None else window - 1
    before_early = (b > a) * np.minimum(a, reach)
    seen_from = np.where(d > c, np.maximum(c - reach, 0), c)
    between = np.maximum(c - np.maximum(seen_from, b), 0)  # after the early chunk, before the late one
    early_again = np.maximum(a - seen_from, 0)  # before the early chunk, seen from the late one
    rows: T = between + np.maximum(before_early, early_again)
    return rows


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


def largest_pieces(lengths: Int64Array, ring_sizes: Int64Array, capacity: int) -> Int64Array:
    """At least the tokens of each document's largest piece, for rings that are known to fit the capacity."""
    return np.minimum(np.where(ring_sizes > 1, 2 * -(-lengths // (2 * ring_sizes)), lengths), capacity)


def smallest_rings(lengths: Int64Array, capacity: int) -> Int64Array:
    """The smallest ring of each document that leaves no member with more than `capacity` tokens."""
    rings = np.maximum(-(-lengths // capacity), 1)
    _widen(lengths, capacity, rings)
    return rings


@jit
def _widen(lengths: Int64Array, capacity: int, rings: Int64Array) -> None:
    """Add members where both chunks of a piece were rounded up and do not fit together."""
    for document in range(len(lengths)):
        while rings[document] > 1 and _largest_piece(lengths[document], rings[document], capacity) > capacity:
            rings[document] += 1


@jit
def _largest_piece(length: int, ring_size: int, enough: int) -> int:
    """Tokens of a document's largest piece; not looked for where no piece can have more than `enough`."""
    chunks = 2 * ring_size
    largest = 2 * -(-length // chunks)
    if largest <= enough:
        return largest
    largest = 0
    for index in range(ring_size):
        early = (index + 1) * length // chunks - index * length // chunks
        late = (chunks - index) * length // chunks - (chunks - 1 - index) * length // chunks
        largest = max(largest, early + late)
    return largest
