"""Supervised spans: which tokens of a document are to be learned, and what that leaves of its labels.

Spans are flat arrays of start, end pairs, in tokens of the document: ascending, not empty, not overlapping. The label
at position i is the token i + 1, so it is supervised where that token lies in a span: a document's first token never is
one. The compiled routines here trust their spans, which `first_bad_span` checks; no file is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.loader.gather import LENGTH, OFFSET, RING_INDEX, RING_SIZE, UNSUPERVISED, Int32Array, ranges
from seqmesh.packer.jit import array_at, jit, pointer
from seqmesh.packer.lengths import Int64Array

EVERYTHING = -1  # in place of a number of spans, for a document without a list: all of it is supervised
OFFSETS, VALUES, SIZE, VALID, VALID_BIT = range(5)  # columns of the table that `locate_spans` takes

SpanArray = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Spans:
    """Of D documents, int64: address [D] of their spans, which are int32, and count [D] of pairs, or EVERYTHING."""

    address: Int64Array
    count: Int64Array


@jit
def first_bad_span(spans: SpanArray, length: int) -> int:
    """The first span that is not inside a document of `length` tokens, is empty, or does not come after the one before
    it (or has no end); -1 where all are sound."""
    done = 0
    for i in range(len(spans) // 2):
        start, end = spans[2 * i], spans[2 * i + 1]
        if not done <= start < end <= length:
            return i
        done = end
    return len(spans) // 2 if len(spans) % 2 else -1


@jit
def supervised_labels(spans: SpanArray, offset: int, length: int) -> int:
    """Labels that count in the `length` tokens from `offset` on, as a document of their own."""
    count = 0
    for i in range(len(spans) // 2):
        count += max(min(spans[2 * i + 1], offset + length) - max(spans[2 * i], offset + 1), 0)
    return count


@jit
def count_listed(
    offsets: Int64Array, values: SpanArray, listed: npt.NDArray[np.bool_], lengths: Int64Array, counts: Int64Array
) -> int:
    """Supervised labels of whole documents, into `counts`: document i has the spans values[offsets[i]:offsets[i + 1]],
    or all of its tokens where it is not `listed`. Returns the documents whose spans are bad, whose counts are -1."""
    bad = 0
    for i in range(len(lengths)):
        spans = values[offsets[i] : offsets[i + 1]]
        if not listed[i]:
            counts[i] = max(lengths[i] - 1, 0)
        elif first_bad_span(spans, lengths[i]) >= 0:
            counts[i] = -1
            bad += 1
        else:
            counts[i] = supervised_labels(spans, 0, lengths[i])
    return bad


@jit
def locate_spans(
    documents: Int64Array, lengths: Int64Array, first_row: Int64Array, table: Int64Array, found: Int64Array
) -> int:
    """Fill `found` [2, D] with the address of each document's spans and their number.

    table [C, 5]: of each record batch, whose first document is first_row[c], the addresses of the list offsets (0: it
    has no such column) and of the values, the number of values, the address of the validity bits (0: all are valid) and
    the first of them. Returns the index of the first document whose offsets or spans are wrong, or -1: a damaged shard
    is not read outside its memory, and what is found can be trusted.
    """
    for i in range(len(documents)):
        document = documents[i]
        chunk = np.searchsorted(first_row, document, side="right") - 1
        row = document - first_row[chunk]
        found[0, i], found[1, i] = 0, EVERYTHING
        if table[chunk, OFFSETS] == 0 or not _is_valid(table[chunk, VALID], table[chunk, VALID_BIT] + row):
            continue
        rows = array_at(pointer(table[chunk, OFFSETS]), (row + 2,), np.int64)
        start, stop = rows[row], rows[row + 1]
        if not 0 <= start <= stop <= table[chunk, SIZE]:
            return i
        address = table[chunk, VALUES] + start * 4
        if first_bad_span(array_at(pointer(address), (stop - start,), np.int32), lengths[document]) >= 0:
            return i
        found[0, i], found[1, i] = address, (stop - start) // 2
    return -1


@jit
def count_supervised(address: Int64Array, count: Int64Array, offsets: Int64Array, lengths: Int64Array) -> Int64Array:
    """Supervised labels of the lengths[i] tokens from offsets[i] on of the documents whose spans these are."""
    labels = np.empty(len(address), np.int64)
    for i in range(len(address)):
        if count[i] == EVERYTHING:
            labels[i] = max(lengths[i] - 1, 0)
        else:
            labels[i] = supervised_labels(_spans_at(address[i], count[i]), offsets[i], lengths[i])
    return labels


@jit
def mask_labels(segments: Int64Array, address: Int64Array, count: Int64Array, labels: Int32Array) -> None:
    """Take the labels that lie in no span out of a batch, whose segments are those of `gather.outline_segments`."""
    row = 0
    for i in range(len(address)):
        a, b, c, d = ranges(segments[LENGTH, i], segments[RING_SIZE, i], segments[RING_INDEX, i])
        for first, last in ((a, b), (c, d)):
            if count[i] != EVERYTHING:
                before = segments[OFFSET, i] + first + 1  # the token that the first of these labels is
                _mask(_spans_at(address[i], count[i]), before, labels[row : row + last - first])
            row += last - first


@jit
def _mask(spans: Int32Array, first: int, labels: Int32Array) -> None:
    """labels: of the tokens from `first` on. Writes between the spans only."""
    done = 0
    for i in range(len(spans) // 2):
        if spans[2 * i + 1] <= first:
            continue
        start = min(max(spans[2 * i] - first, done), len(labels))
        labels[done:start] = UNSUPERVISED
        done = min(spans[2 * i + 1] - first, len(labels))
        if done == len(labels):
            return
    labels[done:] = UNSUPERVISED


@jit
def _spans_at(address: int, count: int) -> Any:
    return array_at(pointer(address), (2 * count,), np.int32)


@jit
def _is_valid(bits: int, number: int) -> bool:
    """Whether a bit is set in the validity bits at an address; all are where there are none."""
    return bits == 0 or array_at(pointer(bits + number // 8), (1,), np.uint8)[0] >> (number % 8) & 1 == 1
