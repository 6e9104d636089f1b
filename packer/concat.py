"""Concatenation: documents one after the other, cut wherever a bin is full. Every bin is full but the last; documents
come apart."""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array


def concat(sizes: Int64Array, capacity: int, max_documents: int) -> tuple[Int64Array, Int64Array, Int64Array, int]:
    """The document, first token and bin of each piece, in order, and the number of bins.

    Sizes of any length. A bin is closed early when it has `max_documents` pieces.
    """
    pieces = _cut(sizes, capacity, max_documents, np.empty((0, 3), np.int64))
    columns = np.empty((pieces, 3), np.int64)
    _cut(sizes, capacity, max_documents, columns)
    document, start, bin_of = np.ascontiguousarray(columns.T)
    return document, start, bin_of, int(bin_of[-1]) + 1 if pieces else 0


@jit
def _cut(sizes: Int64Array, capacity: int, max_documents: int, columns: Int64Array) -> int:
    """Write document, start and bin of every piece to `columns` if that has rows; returns the number of pieces."""
    pieces, last, room, held = 0, -1, 0, 0
    for document in range(len(sizes)):
        done = 0
        while True:
            if last < 0 or held == max_documents or (room == 0 and done < sizes[document]):
                last, room, held = last + 1, capacity, 0
            taken = min(room, sizes[document] - done)
            if len(columns):
                columns[pieces, 0], columns[pieces, 1], columns[pieces, 2] = document, done, last
            pieces, room, held, done = pieces + 1, room - taken, held + 1, done + taken
            if done == sizes[document]:
                break
    return pieces
