"""Supervised spans on their way into a shard set, and in the columns `targets` of one: checked and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.packer.lengths import Int64Array

Int32Array = npt.NDArray[np.int32]


def flat_spans(pairs: npt.ArrayLike, length: int) -> Int32Array:
    """Pairs [S, 2] of start and end as a shard holds them. Raises ValueError for what are no pairs of integers, and
    for the first pair that does not ascend inside a document of `length` tokens."""
    given = np.asarray(pairs)
    if given.size == 0:
        return np.zeros(0, np.int32)
    if given.ndim != 2 or given.shape[1] != 2 or given.dtype.kind not in "iu":
        raise ValueError(f"targets are {given.dtype} of shape {given.shape}: must be pairs of integers, start and end")
    spans = given.astype(np.int64).ravel()
    starts, ends = spans[::2], spans[1::2]
    sound = (np.append(0, ends[:-1]) <= starts) & (starts < ends) & (ends <= min(length, np.iinfo(np.int32).max))
    if not sound.all():
        bad = int(sound.argmin())
        raise ValueError(
            f"span {bad} of its targets is {given[bad, 0]} to {given[bad, 1]}: spans must lie inside its {length} "
            "tokens, not be empty, and begin where the one before has ended, or later"
        )
    return spans.astype(np.int32)


def all_labels(lengths: Int64Array) -> Int64Array:
    """Labels of documents that are supervised everywhere: the last token has no successor to predict."""
    return np.maximum(lengths - 1, 0)


def supervised_in(column: Any, lengths: Int64Array) -> Int64Array:
    """Labels that count in each document of a record batch, from its column `targets`; −1 where the spans are bad. The
    column's offsets must lie inside its values."""
    from seqmesh.loader.spans import count_listed  # here: sets without spans do without the compiler

    counts = np.empty(len(lengths), np.int64)
    # Copies, because numba would compile everything a second time for arrays that are read-only.
    offsets, values = np.array(list_offsets(column)), np.array(column.values.to_numpy())
    listed = np.array(column.is_valid().to_numpy(zero_copy_only=False))
    count_listed(offsets, values, listed, lengths, counts)
    return counts


def target_problems(column: Any, lengths: Int64Array, supervised: Int64Array | None) -> Iterator[str]:
    """What is wrong with the column `targets` of a record batch whose documents have these lengths, and for which the
    lengths index gives so many supervised tokens, None where it says nothing."""
    yield from offset_problems(column, "ends of spans")
    offsets = list_offsets(column)
    if offsets.min() < 0 or offsets.max() > len(column.values):
        return
    if nulls := column.values.null_count:
        yield f"the spans in the column targets have {nulls:,} nulls"
        return
    counts = supervised_in(column, lengths)
    if wrong := int((counts < 0).sum()):
        yield f"the spans of {wrong:,} documents are not ascending ranges of their tokens"
    if supervised is not None:
        yield from count_problems(counts[counts >= 0], supervised[counts >= 0])


def count_problems(counts: Int64Array, supervised: Int64Array) -> Iterator[str]:
    """Where the lengths index gives other numbers of supervised tokens than a shard."""
    if wrong := int((counts != supervised).sum()):
        yield f"the supervised tokens of {wrong:,} documents are not as many as the lengths index says"


def offset_problems(column: Any, what: str) -> Iterator[str]:
    """What is wrong with the offsets of a list column, whose values are `what`."""
    offsets, size = list_offsets(column), len(column.values)
    if wrong := int((np.diff(offsets) < 0).sum()):
        yield f"the offsets of {wrong:,} documents run backwards"
    low, high = int(offsets.min()), int(offsets.max())
    if low < 0 or high > size:
        yield f"offsets reach from {low:,} to {high:,}: there are {size:,} {what}"
    elif offsets[0] != 0 or offsets[-1] != size:
        yield f"{size - int(offsets[-1] - offsets[0]):,} {what} belong to no document"


def list_offsets(column: Any) -> Int64Array:
    """The row offsets of a large_list column, straight from the buffer: Arrow's own readers trust them."""
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int64, buffer.size // 8)[column.offset : column.offset + len(column) + 1]
