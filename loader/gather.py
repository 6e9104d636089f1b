"""The compiled routines behind `batch`: which segments a micro-batch has, and its tokens, from raw addresses.

Nothing here checks an address: they come from `ShardSet`, which does. Arrays are int64 where nothing else is said.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.packer.jit import array_at, jit, pointer, prefetch
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import chunk_start

UNSUPERVISED = -100
DOCUMENT, OFFSET, LENGTH, RING, RING_SIZE, RING_INDEX = range(6)  # rows of the segments that `outline_segments` gives
ADDRESS, WIDTH, LIMIT = range(3)  # rows of the places that `gather` takes
AHEAD = 4  # cache lines: from there the hardware goes on by itself

Int32Array = npt.NDArray[np.int32]

_chunk_start = jit(chunk_start)


@jit
def outline_segments(
    rank: int,
    wave: int,
    ranks: Int64Array,
    waves: Int64Array,
    order: Int64Array,
    ring_sizes: Int64Array,
    ring_indices: Int64Array,
    lengths: Int64Array,
    ring_offsets: Int64Array,
    ring_ranks: Int64Array,
    documents: Int64Array,
    offsets: Int64Array,
) -> tuple[Int64Array, Int64Array, int, int]:
    """The pieces of one micro-batch, from the columns of a step plan and of its documents.

    Returns segments [6, N] (document, offset, length, ring or -1, ring size, ring index), the ranks of their rings one
    after the other, the tokens of all segments, and of the longest.
    """
    first = np.searchsorted(ranks, rank)
    last = first + np.searchsorted(ranks[first:], rank + 1)
    start = first + np.searchsorted(waves[first:last], wave)
    stop = first + np.searchsorted(waves[first:last], wave + 1)
    segments = np.empty((6, stop - start), np.int64)
    members = np.empty(ring_sizes[start:stop].sum(), np.int64)
    tokens, longest, end = 0, 0, 0
    for i in range(stop - start):
        document, size, index = order[start + i], ring_sizes[start + i], ring_indices[start + i]
        segments[DOCUMENT, i], segments[OFFSET, i] = documents[document], offsets[document]
        segments[LENGTH, i] = lengths[document]
        segments[RING, i] = document if size > 1 else -1
        segments[RING_SIZE, i], segments[RING_INDEX, i] = size, index
        members[end : end + size] = ring_ranks[ring_offsets[document] : ring_offsets[document] + size]
        end += size
        a, b, c, d = ranges(lengths[document], size, index)
        tokens += b - a + d - c
        longest = max(longest, b - a + d - c)
    return segments, members, tokens, longest


@jit
def write_segments(
    segments: Int64Array,
    members: Int64Array,
    cu_seqlens: Int32Array,
    document_ids: Int64Array,
    document_offsets: Int64Array,
    document_lengths: Int64Array,
    ring_ids: Int64Array,
    ring_sizes: Int64Array,
    ring_indices: Int64Array,
    ring_ranks: Int64Array,
) -> None:
    """Fill a batch's arrays that are not per token."""
    document_ids[:] = segments[DOCUMENT]
    document_offsets[:] = segments[OFFSET]
    document_lengths[:] = segments[LENGTH]
    ring_ids[:] = segments[RING]
    ring_sizes[:] = segments[RING_SIZE]
    ring_indices[:] = segments[RING_INDEX]
    ring_ranks[:] = members
    cu_seqlens[0] = 0
    for i in range(segments.shape[1]):
        a, b, c, d = ranges(segments[LENGTH, i], segments[RING_SIZE, i], segments[RING_INDEX, i])
        cu_seqlens[i + 1] = cu_seqlens[i] + b - a + d - c


@jit
def write_block(
    segments: Int64Array,
    members: Int64Array,
    places: Int64Array,
    block: npt.NDArray[np.uint8],
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
) -> int:
    """Fill a batch's block, whose arrays begin at `starts` and have so many items, in the order of `batch.ARRAYS`.
    One call for all, since each costs as much as gathering ten thousand tokens. The rest as for `gather`."""
    write_segments(
        segments,
        members,
        block[starts[3] :][: 4 * lengths[3]].view(np.int32),
        block[starts[4] :][: 8 * lengths[4]].view(np.int64),
        block[starts[5] :][: 8 * lengths[5]].view(np.int64),
        block[starts[6] :][: 8 * lengths[6]].view(np.int64),
        block[starts[7] :][: 8 * lengths[7]].view(np.int64),
        block[starts[8] :][: 8 * lengths[8]].view(np.int64),
        block[starts[9] :][: 8 * lengths[9]].view(np.int64),
        block[starts[10] :][: 8 * lengths[10]].view(np.int64),
    )
    return int(
        gather(
            segments,
            places,
            block[starts[0] :][: 4 * lengths[0]].view(np.int32),
            block[starts[1] :][: 4 * lengths[1]].view(np.int32),
            block[starts[2] :][: 4 * lengths[2]].view(np.int32),
        )
    )


@jit
def gather(
    segments: Int64Array,
    places: Int64Array,
    input_ids: Int32Array,
    labels: Int32Array,
    position_ids: Int32Array,
) -> int:
    """Fill a batch's arrays that are per token; labels and position_ids may be empty: they are left out then.

    places [3, N]: of each segment's row of the set the address of its first token, the bytes of an id, and what its ids
    must be below (see `ShardSet.places`). The label of a token is the next one of its document, none for the last. Rows
    after the last segment are padding. Returns the first segment that holds an id which is not below its limit, -1 for
    none; nothing else is wrong with the batch then.
    """
    row, bad = 0, -1
    for i in range(places.shape[1]):
        length, width = segments[LENGTH, i], places[WIDTH, i]
        address = places[ADDRESS, i] + segments[OFFSET, i] * width
        if i + 1 < places.shape[1]:  # by the time it is there, the next document's beginning has come
            for line in range(AHEAD):
                prefetch(places[ADDRESS, i + 1] + segments[OFFSET, i + 1] * places[WIDTH, i + 1] + line * 64)
        a, b, c, d = ranges(length, segments[RING_SIZE, i], segments[RING_INDEX, i])
        for first, last in ((a, b), (c, d)):
            if first == last:
                continue
            start, row = row, row + last - first
            largest = _copy(address + first * width, width, input_ids[start:row])
            if len(labels):
                labelled = start + min(last, length - 1) - first
                largest = max(largest, _copy(address + (first + 1) * width, width, labels[start:labelled]))
                labels[labelled:row] = UNSUPERVISED
            if len(position_ids):
                _count_up(first, position_ids[start:row])
            if largest >= places[LIMIT, i] and bad < 0:
                bad = i
    input_ids[row:] = 0
    labels[row:] = UNSUPERVISED
    position_ids[row:] = 0
    return bad


@jit
def ranges(length: int, ring_size: int, index: int) -> tuple[int, int, int, int]:
    """`pieces.piece_ranges` in one tuple; a document that is whole is one range."""
    if ring_size == 1:
        return 0, length, length, length
    mirror = 2 * ring_size - 1 - index
    return (
        _chunk_start(length, ring_size, index),
        _chunk_start(length, ring_size, index + 1),
        _chunk_start(length, ring_size, mirror),
        _chunk_start(length, ring_size, mirror + 1),
    )


@jit
def _copy(address: int, width: int, out: Int32Array) -> int:
    """As many tokens as there is room for, from an address; returns the largest id. Ids are read as unsigned: a
    negative one is larger than any vocabulary."""
    if width == 2:
        return int(_widen(array_at(pointer(address), (len(out),), np.uint16), out))
    if width == 4:
        return int(_widen(array_at(pointer(address), (len(out),), np.uint32), out))
    if width == 8:
        return int(min(_widen(array_at(pointer(address), (len(out),), np.uint64), out), np.uint64(1 << 62)))
    return int(_widen(array_at(pointer(address), (len(out),), np.uint8), out))


@jit
def _widen(ids: npt.NDArray[Any], out: Int32Array) -> Any:
    """Copy, and find the largest on the way: that costs nothing beside the memory."""
    largest = ids.dtype.type(0)
    for i in range(len(out)):
        out[i] = ids[i]
        largest = max(largest, ids[i])
    return largest


@jit
def _count_up(first: int, out: Int32Array) -> None:
    for i in range(len(out)):
        out[i] = first + i
