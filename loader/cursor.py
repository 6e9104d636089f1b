"""A place in an epoch of one source, and the pieces that come there.

A cursor is an int64 array: position in the order of the epoch, offset in the document there, tokens served, tokens
truncated, documents dropped; and, where there are several sources, tokens served since the weights last changed, and
the source's share of them. These routines move it and count what was cut or left out; what becomes of a piece, and the
counts of tokens served, are their caller's.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from seqmesh.packer.blocks import item_at, window_at
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.overlong import Policy
from seqmesh.packer.permute import permute_inside

POLICIES = get_args(Policy)
TRUNCATE, SPLIT, DROP = 1, 2, 3  # places in POLICIES
SINCE, SHARE = 5, 6  # places in a cursor


@jit
def stretch_at(position: int, size: int, key: int, blocks: Int64Array) -> tuple[int, int, int]:
    """The positions around one, of a source of `size` documents, that are shuffled among themselves: the first, where
    they end, and their key; −1: they are in order, as everything is with a key of −1. blocks: a table of
    `packer.blocks` for a shuffle by blocks; without rows, the shuffle is global."""
    return window_at(position, key, blocks) if len(blocks) else (0, size, key)


@jit
def place_at(position: int, start: int, stop: int, key: int, blocks: Int64Array, by_blocks: bool) -> int:
    """Which of the source's documents comes at a position of a stretch that is shuffled. by_blocks: that there are any;
    a loop asks once."""
    place = permute_inside(position, start, stop, key)
    if by_blocks:
        place = item_at(place, blocks)
    return place


@jit
def document_at(position: int, size: int, documents: Int64Array, key: int, blocks: Int64Array) -> int:
    """The document (row of the set) at a position of a source of `size` documents, which are `documents`, or all of the
    set where that is empty. key, blocks: see `stretch_at`."""
    start, stop, key = stretch_at(position, size, key, blocks)
    place = place_at(position, start, stop, key, blocks, len(blocks) > 0) if key >= 0 else position
    return documents[place] if len(documents) else place


@jit
def documents_at(positions: Int64Array, size: int, documents: Int64Array, key: int, blocks: Int64Array) -> Int64Array:
    """`document_at` for each of these."""
    found = np.empty_like(positions)
    for i in range(len(positions)):
        found[i] = document_at(positions[i], size, documents, key, blocks)
    return found


@jit
def look(
    cursor: Int64Array,
    lengths: Int64Array,
    size: int,
    documents: Int64Array,
    key: int,
    blocks: Int64Array,
    longest: int,
    policy: int,
) -> tuple[int, int]:
    """Document and length of the piece that comes next, past documents that are dropped; (−1, 0) at the epoch's end."""
    while cursor[0] < size:
        document = document_at(cursor[0], size, documents, key, blocks)
        remaining = lengths[document] - cursor[1]
        if policy != DROP or remaining <= longest:
            return document, min(remaining, longest)
        cursor[0] += 1
        cursor[4] += 1
    return -1, 0


@jit
def move_on(cursor: Int64Array, document_length: int, length: int, policy: int) -> None:
    """Past a piece of this length."""
    left = document_length - cursor[1] - length
    if left > 0:
        if policy == SPLIT:
            cursor[1] += length
            return
        cursor[3] += left
    cursor[0] += 1
    cursor[1] = 0


@jit
def add_row(
    rows: Int64Array, count: int, document: int, offset: int, length: int, source: int
) -> tuple[Int64Array, int]:
    """The rows with one more, in place where there is room."""
    if count == len(rows):
        rows = np.concatenate((rows, np.empty_like(rows)))
    rows[count, 0], rows[count, 1], rows[count, 2], rows[count, 3] = document, offset, length, source
    return rows, count + 1
