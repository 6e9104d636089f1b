"""Best-fit decreasing: documents from the longest to the shortest, each into the fullest bin that still holds it.

Lengths are small integers, so three things make it fast. A histogram replaces the sort. Bins of equal room are kept as
*runs* of consecutive numbers, so that many documents of one length are placed in one step, as many into each bin of a
run as it holds: once a bin is the fullest that fits, it stays that until nothing more fits. And the least sufficient
room is found in a tree of bits (`rooms`). Bins come out as one stream, the longest document's first, and a last pass
hands them to the documents in the order of the input. O(documents + capacity) time; O(capacity) memory beside the
result, whose upper half holds the stream until it is handed out.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.rooms import LARGEST_INDEX, Words, least_room, mark, room_index, unmark
from seqmesh.packer.rules import NO_LIMIT, Rules
from seqmesh.packer.sorting import descending

Int32Array = npt.NDArray[np.int32]

MOST_DOCUMENTS = (1 << 31) - 1
BINS_LOOKED_AT = 64  # where bins have a second limit: the fullest ones that hold the tokens


def best_fit_decreasing(sizes: Int64Array, rules: Rules) -> tuple[Int64Array, int]:
    """Bin of each document, and the number of bins.

    With a second resource a document goes into the fullest of the 64 fullest bins that hold its tokens, and into a new
    bin if none of those has enough of the other.
    """
    capacity = rules.capacity
    if capacity > 64 * len(sizes):  # no bin holds more than everything
        capacity = min(capacity, max(int(sizes.sum()), 1))
    bin_of = np.empty(len(sizes), np.int64)
    if len(sizes) == 0:
        return bin_of, 0
    if capacity > LARGEST_INDEX:
        return _in_sorted_list(sizes, descending(sizes), capacity, rules)
    if not len(rules.extra):
        return bin_of, place_runs(sizes, capacity, rules.max_documents, bin_of)
    no_rooms = np.zeros(0, np.int64)
    count = _place_each(
        sizes, descending(sizes), capacity, no_rooms, rules.max_documents, rules.extra, rules.extra_capacity, bin_of
    )
    return bin_of, count


def best_fit(sizes: Int64Array, capacity: int, rooms: Int64Array) -> tuple[Int64Array, int]:
    """Best-fit decreasing into bins that are partly full already: bins 0 to len(rooms) − 1 have this much room left.

    Returns the bin of each document and the number of bins. The caller has checked sizes and rooms against the
    capacity.
    """
    bin_of = np.empty(len(sizes), np.int64)
    return bin_of, _place_each(
        sizes, descending(sizes), capacity, rooms, NO_LIMIT, np.zeros(0, np.int64), NO_LIMIT, bin_of
    )


# Columns of the table of runs: the first bin, how many, documents in each (0 where they are not limited), the next run
# of the same room (-1: none). The last row counts: rows used so far, rows given back; those are linked by _UNDER.
_FIRST, _BINS, _HELD, _UNDER = 0, 1, 2, 3


@jit
def place_runs(sizes: Int64Array, capacity: int, max_documents: int, bin_of: Int64Array) -> int:
    """Fill `bin_of` [N] with the bin of each document, none with more than `max_documents`; returns the number of bins.

    The caller has seen to it that there are 1 to 2**31 − 1 documents, of 0 to `capacity` tokens.
    """
    narrow = bin_of.view(np.int32)
    stream = narrow[len(sizes) :]
    places, top = np.zeros((2, capacity + 1), np.int32)  # one block: malloc keeps it for the next call
    for size in sizes:
        places[size] += 1
    num_bins = _fill(places, top, max_documents, stream)
    for i in range(len(sizes)):
        size = sizes[i]
        narrow[i] = stream[places[size]]
        places[size] += 1
    for i in range(len(sizes) - 1, -1, -1):  # widened in place, from the end: nothing is written before it was read
        bin_of[i] = narrow[i]
    return num_bins


@jit
def _fill(counts: Int32Array, top: Int32Array, max_documents: int, stream: Int32Array) -> int:
    """Write every document's bin to `stream`, the longest first, and to `counts` where each size begins in it."""
    capacity = len(top) - 1
    largest = _next_size(counts, capacity)
    smallest = 0
    while not counts[smallest]:
        smallest += 1
    words, starts = room_index(capacity)
    runs = np.empty((min(len(stream), 2 * largest + 2) + 1, 4), np.int32)  # a size leaves two more, a document one
    runs[-1, _FIRST], runs[-1, _UNDER] = 0, -1
    limited = max_documents < NO_LIMIT
    at, num_bins = 0, 0
    size = largest + 1
    while size > smallest:
        size = _next_size(counts, size - 1)
        left = counts[size]
        counts[size] = at
        while left > 0:
            room = least_room(words, starts, size)
            if room >= 0:
                run = top[room]
                first, bins, held = runs[run, _FIRST], runs[run, _BINS], runs[run, _HELD]
            else:
                run, first, bins, held, room = -1, num_bins, left, 0, capacity
            each = max_documents - held
            if size > 0:
                each = min(each, room // size)
            full = min(left // each, bins)
            rest = min(left - full * each, each) if full < bins else 0
            if run >= 0:
                _take(words, starts, top, runs, room, full + (rest > 0))
            else:
                num_bins += full + (rest > 0)
            at = _emit(stream, at, first, full, each)
            at = _emit(stream, at, first + full, 1, rest)
            left -= full * each + rest
            if full > 0 and room - size * each >= smallest and held + each < max_documents:
                _push(words, starts, top, runs, room - size * each, first, full, (held + each) * limited)
            if rest > 0 and room - size * rest >= smallest and held + rest < max_documents:
                _push(words, starts, top, runs, room - size * rest, first + full, 1, (held + rest) * limited)
    return num_bins


@jit
def _next_size(counts: Int32Array, size: int) -> int:
    """The largest size up to this one that documents have; there is one. Four at a time where there are none."""
    while not counts[size]:
        size -= 1
        while size >= 3 and not counts[size] | counts[size - 1] | counts[size - 2] | counts[size - 3]:
            size -= 4
    return size


@jit
def _take(words: Words, starts: Int64Array, top: Int32Array, runs: Int32Array, room: int, bins: int) -> None:
    """Take so many bins away from the newest run of this room, the first of them first."""
    run = top[room]
    if bins < runs[run, _BINS]:
        runs[run, _FIRST] += bins
        runs[run, _BINS] -= bins
        return
    top[room] = runs[run, _UNDER]
    if top[room] < 0:
        unmark(words, starts, room)
    runs[run, _UNDER] = runs[-1, _UNDER]
    runs[-1, _UNDER] = run


@jit
def _push(
    words: Words, starts: Int64Array, top: Int32Array, runs: Int32Array, room: int, first: int, bins: int, held: int
) -> None:
    """Add bins of this room; they make one run with those that were added last where the numbers go on."""
    known = (words[room >> 6] >> np.uint64(room & 63)) & np.uint64(1)
    newest = top[room] if known else -1
    if known and runs[newest, _HELD] == held and runs[newest, _FIRST] + runs[newest, _BINS] == first:
        runs[newest, _BINS] += bins
        return
    run = runs[-1, _UNDER]
    if run >= 0:
        runs[-1, _UNDER] = runs[run, _UNDER]
    else:
        run = runs[-1, _FIRST]
        runs[-1, _FIRST] += 1
    runs[run, _FIRST], runs[run, _BINS], runs[run, _HELD], runs[run, _UNDER] = first, bins, held, newest
    top[room] = run
    if not known:
        mark(words, starts, room)


@jit
def _emit(stream: Int32Array, at: int, first: int, bins: int, each: int) -> int:
    """Write `bins` bin numbers from `first` on, each of them `each` times; returns where it ended."""
    for bin_number in range(first, first + bins):
        for _ in range(each):
            stream[at] = bin_number
            at += 1
    return at


@jit
def _place_each(
    sizes: Int64Array,
    longest_first: Int64Array,
    capacity: int,
    rooms: Int64Array,
    max_documents: int,
    extra: Int64Array,
    extra_capacity: int,
    bin_of: Int64Array,
) -> int:
    """One document at a time, into bins that may have two more limits; returns the number of bins.

    Bins of equal room are a chain: `top[room]`, `under[bin]`. `held` and `extra_room` are what the bins hold.
    """
    words, starts = room_index(capacity)
    top = np.full(capacity + 1, -1, np.int64)
    under = np.empty(len(rooms) + len(sizes), np.int64)
    held = np.zeros(len(under), np.int64)
    extra_room = np.full(len(under), extra_capacity, np.int64)
    num_bins = len(rooms)
    for opened in range(num_bins):
        _chain(words, starts, top, under, rooms[opened], opened)
    for document in longest_first:
        size = sizes[document]
        second = extra[document] if len(extra) else 0
        chosen, room = _take_fitting(words, starts, top, under, extra_room, size, second)
        if chosen < 0:
            chosen, room = num_bins, capacity
            num_bins += 1
        bin_of[document] = chosen
        extra_room[chosen] -= second
        held[chosen] += 1
        if held[chosen] < max_documents:
            _chain(words, starts, top, under, room - size, chosen)
    return num_bins


@jit
def _chain(words: Words, starts: Int64Array, top: Int64Array, under: Int64Array, room: int, chosen: int) -> None:
    """Put a bin on top of those of its room."""
    if top[room] < 0:
        mark(words, starts, room)
    under[chosen] = top[room]
    top[room] = chosen


@jit
def _take_fitting(
    words: Words, starts: Int64Array, top: Int64Array, under: Int64Array, extra_room: Int64Array, size: int, second: int
) -> tuple[int, int]:
    """Unchain the fullest bin that holds both, and give its room with it; −1 where none of those looked at does."""
    room = least_room(words, starts, size)
    looked_at = 0
    while room >= 0:
        above, chosen = -1, top[room]
        while chosen >= 0 and looked_at < BINS_LOOKED_AT:
            if extra_room[chosen] >= second:
                if above >= 0:
                    under[above] = under[chosen]
                else:
                    top[room] = under[chosen]
                if top[room] < 0:
                    unmark(words, starts, room)
                return chosen, room
            above, chosen = chosen, under[chosen]
            looked_at += 1
        if looked_at == BINS_LOOKED_AT:
            return -1, 0
        room = least_room(words, starts, room + 1) if room + 1 < len(top) else -1
    return -1, 0


def _in_sorted_list(
    sizes: Int64Array, longest_first: Int64Array, capacity: int, rules: Rules
) -> tuple[Int64Array, int]:
    """The same for capacities that are too large for a table: open bins in a list, sorted by room."""
    bin_of = np.empty(len(sizes), np.int64)
    open_bins: list[tuple[int, int]] = []  # room, and minus the bin: of equal room the newest comes first
    held: list[int] = []
    extra_room: list[int] = []
    for document in longest_first.tolist():
        size, second = int(sizes[document]), int(rules.extra[document]) if len(rules.extra) else 0
        first = bisect_left(open_bins, (size, -len(held)))
        looked_at = range(first, min(first + BINS_LOOKED_AT, len(open_bins)))
        at = next((i for i in looked_at if extra_room[-open_bins[i][1]] >= second), -1)
        if at < 0:
            room, chosen = capacity, len(held)
            held.append(0)
            extra_room.append(rules.extra_capacity)
        else:
            room, chosen = open_bins[at][0], -open_bins.pop(at)[1]
        bin_of[document] = chosen
        held[chosen] += 1
        extra_room[chosen] -= second
        if held[chosen] < rules.max_documents:
            insort(open_bins, (room - size, -chosen))
    return bin_of, len(held)
