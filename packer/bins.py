"""Bin packing: which documents share one micro-batch of at most `capacity` tokens.

`pack(lengths, capacity)` gives each document a bin. Best-fit decreasing takes the documents from the longest to the
shortest and puts each into the fullest bin that still holds it. Lengths are integers, so a counting sort replaces the
comparison sort and bins are indexed by the room left in them: O(documents + capacity) with a small constant.
It does not split, cut or drop a document; one that is longer than the capacity is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seqmesh.packer.jit import jit, trailing_zeros
from seqmesh.packer.lengths import Int64Array, as_lengths, total

WORD_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """A packing of N documents into B bins.

    bin_of [N]: the bin of each document. order [N], offsets [B + 1]: documents of bin b, in the order they were
    placed, are order[offsets[b]:offsets[b + 1]]. All int64.
    """

    capacity: int
    bin_of: Int64Array
    order: Int64Array
    offsets: Int64Array
    tokens: int

    @property
    def count(self) -> int:
        return len(self.offsets) - 1

    @property
    def fill(self) -> float:
        """Tokens over room, 1.0 where every bin is full; 1.0 for no bins."""
        return self.tokens / (self.count * self.capacity) if self.count else 1.0

    def documents(self, index: int) -> Int64Array:
        """The documents of one bin."""
        return self.order[self.offsets[index] : self.offsets[index + 1]]


def pack(lengths: npt.ArrayLike, capacity: int, *, method: str = "best_fit_decreasing") -> Bins:
    """Pack documents into bins of `capacity` tokens.

    Deterministic: the answer depends on the values alone, not on the integer dtype. Raises ValueError for a capacity
    below 1, an unknown method, a bad length (see `as_lengths`) or a document longer than the capacity.
    """
    checked = as_lengths(lengths)
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}: must be at least 1")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: must be one of {', '.join(sorted(METHODS))}")
    if len(checked) and int(checked.max()) > capacity:
        longest = int(checked.argmax())
        raise ValueError(f"document {longest} has {int(checked[longest])} tokens: more than the capacity, {capacity}")
    tokens = total(checked, "lengths")
    # A bin never holds more than all tokens, so the index need not be larger than that.
    bin_of, placed, num_bins = METHODS[method](checked, min(capacity, max(tokens, 1)))
    order, offsets = _group(placed, bin_of, num_bins)
    return Bins(capacity=capacity, bin_of=bin_of, order=order, offsets=offsets, tokens=tokens)


def _best_fit_decreasing(lengths: Int64Array, capacity: int) -> tuple[Int64Array, Int64Array, int]:
    """Bin of each document, the documents in the order of placement, and the number of bins."""
    bin_of, count = best_fit(lengths, capacity, np.zeros(0, np.int64))
    return bin_of, descending(lengths), count


def best_fit(lengths: Int64Array, capacity: int, rooms: Int64Array) -> tuple[Int64Array, int]:
    """Best-fit decreasing into bins that are partly full already: bins 0 to len(rooms) − 1 have this much room left.

    Returns the bin of each document and the number of bins. The caller has checked lengths and rooms against the
    capacity.
    """
    bin_of = np.empty(len(lengths), np.int64)
    return bin_of, _place_best_fit(lengths, descending(lengths), capacity, rooms, bin_of)


METHODS: dict[str, Callable[[Int64Array, int], tuple[Int64Array, Int64Array, int]]] = {
    "best_fit_decreasing": _best_fit_decreasing
}


def descending(values: Int64Array) -> Int64Array:
    """Indices from the largest value to the smallest, equal values in index order. Values must not be negative."""
    if len(values) == 0:
        return np.zeros(0, np.int64)
    largest = int(values.max())
    if largest > 8 * len(values):  # few documents, long range: the counting table would cost more than the sort
        return np.argsort(-values, kind="stable").astype(np.int64, copy=False)
    return _counting_sort(values, largest)


@jit
def _counting_sort(values: Int64Array, largest: int) -> Int64Array:
    starts = np.zeros(largest + 2, np.int64)  # bucket of value v is largest - v, so that large values come first
    for value in values:
        starts[largest - value + 1] += 1
    for bucket in range(largest + 1):
        starts[bucket + 1] += starts[bucket]
    order = np.empty(len(values), np.int64)
    for i in range(len(values)):
        bucket = largest - values[i]
        order[starts[bucket]] = i
        starts[bucket] += 1
    return order


@jit
def _room_index(capacity: int) -> tuple[npt.NDArray[np.uint64], Int64Array]:
    """An empty set of rooms 0..capacity, as a 64-ary tree of bits: a bit of level h + 1 says that the word under it
    on level h is not zero. Word i of level h is words[starts[h] + i]."""
    sizes = [capacity // WORD_BITS + 1]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] - 1) // WORD_BITS + 1)
    starts = np.zeros(len(sizes) + 1, np.int64)
    for height in range(len(sizes)):
        starts[height + 1] = starts[height] + sizes[height]
    return np.zeros(starts[-1], np.uint64), starts


@jit
def _mark(words: npt.NDArray[np.uint64], starts: Int64Array, room: int) -> None:
    """Say that some bin has this much room; where a word had a bit already, those above it are set."""
    for height in range(len(starts) - 1):
        word = starts[height] + room // WORD_BITS
        known = words[word] != 0
        words[word] |= np.uint64(1) << np.uint64(room % WORD_BITS)
        if known:
            return
        room //= WORD_BITS


@jit
def _unmark(words: npt.NDArray[np.uint64], starts: Int64Array, room: int) -> None:
    """Say that no bin has this much room any more; an upper bit falls only with the last bit under it."""
    for height in range(len(starts) - 1):
        word = starts[height] + room // WORD_BITS
        words[word] &= ~(np.uint64(1) << np.uint64(room % WORD_BITS))
        if words[word]:
            return
        room //= WORD_BITS


@jit
def _least_room(words: npt.NDArray[np.uint64], starts: Int64Array, need: int) -> int:
    """The smallest marked room of at least `need`, or -1: up the levels until a word has a bit, then down to it."""
    at = need
    for height in range(len(starts) - 1):
        word = starts[height] + at // WORD_BITS
        if word >= starts[height + 1]:
            return -1
        bits = words[word] >> np.uint64(at % WORD_BITS)
        if bits:
            at += trailing_zeros(bits)
            for below in range(height - 1, -1, -1):
                at = at * WORD_BITS + trailing_zeros(words[starts[below] + at])
            return at
        at = at // WORD_BITS + 1
    return -1


@jit
def _place_best_fit(
    lengths: Int64Array, longest_first: Int64Array, capacity: int, rooms: Int64Array, bin_of: Int64Array
) -> int:
    """Fill `bin_of`; returns the number of bins. Bins of equal room form a stack: `top[room]`, `under[bin]`."""
    words, starts = _room_index(capacity)
    top = np.full(capacity + 1, -1, np.int64)
    under = np.empty(len(rooms) + len(lengths), np.int64)
    num_bins = len(rooms)
    for opened in range(num_bins):
        _mark(words, starts, rooms[opened])
        under[opened] = top[rooms[opened]]
        top[rooms[opened]] = opened
    for document in longest_first:
        length = lengths[document]
        room = _least_room(words, starts, length)
        if room < 0:
            chosen, left = num_bins, capacity - length
            num_bins += 1
        else:
            chosen, left = top[room], room - length
            top[room] = under[chosen]
            if top[room] < 0:
                _unmark(words, starts, room)
        bin_of[document] = chosen
        if top[left] < 0:
            _mark(words, starts, left)
        under[chosen] = top[left]
        top[left] = chosen
    return num_bins


@jit
def _group(placed: Int64Array, bin_of: Int64Array, num_bins: int) -> tuple[Int64Array, Int64Array]:
    """Documents grouped by bin, in the order of placement, and each bin's start (CSR)."""
    offsets = np.zeros(num_bins + 1, np.int64)
    for chosen in bin_of:
        offsets[chosen + 1] += 1
    for i in range(num_bins):
        offsets[i + 1] += offsets[i]
    free = offsets[:-1].copy()
    order = np.empty(len(bin_of), np.int64)
    for document in placed:
        chosen = bin_of[document]
        order[free[chosen]] = document
        free[chosen] += 1
    return order, offsets
