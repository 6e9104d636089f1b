"""Packing that follows the order of the documents: first fit, next fit and bounded lookahead.

Sizes and rules in, the bin of each document out; nothing is checked here. All run in O(N log N) and are compiled.
"""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.rooms import LARGEST_INDEX, Words, least_room, mark, room_index, unmark
from seqmesh.packer.rules import Rules
from seqmesh.packer.sorting import descending

CANDIDATES_LOOKED_AT = 64  # in the lookahead, where bins have a second limit


def next_fit(sizes: Int64Array, rules: Rules) -> tuple[Int64Array, int]:
    """A new bin whenever the next document does not fit into the last one."""
    bin_of = np.empty(len(sizes), np.int64)
    return bin_of, _next_fit(sizes, rules.capacity, rules.max_documents, rules.extra, rules.extra_capacity, bin_of)


def first_fit(sizes: Int64Array, rules: Rules) -> tuple[Int64Array, int]:
    """Each document into the lowest bin that holds it, in the order of the documents."""
    return _first_fit_by(np.arange(len(sizes)), sizes, rules)


def first_fit_decreasing(sizes: Int64Array, rules: Rules) -> tuple[Int64Array, int]:
    """Each document into the lowest bin that holds it, from the longest document to the shortest."""
    return _first_fit_by(descending(sizes), sizes, rules)


def order_keeping(sizes: Int64Array, rules: Rules) -> tuple[Int64Array, int]:
    """Bins begin with the first document that is unplaced, and are filled with the longest that fit out of that and the
    `lookahead` ones after it; of equal length the earliest. No document comes more than `lookahead` places too early;
    with 0 it is next fit."""
    bin_of = np.full(len(sizes), -1, np.int64)
    if int(sizes.max(initial=0)) <= LARGEST_INDEX:
        values, ranks = np.arange(sizes.max(initial=0) + 1), sizes
    else:
        values, ranks = np.unique(sizes, return_inverse=True)
    lookahead = min(rules.lookahead, len(sizes))
    count = _fill_in_order(
        sizes,
        values,
        ranks,
        rules.capacity,
        lookahead,
        rules.max_documents,
        rules.extra,
        rules.extra_capacity,
        bin_of,
    )
    return bin_of, count


@jit
def _next_fit(
    sizes: Int64Array,
    capacity: int,
    max_documents: int,
    extra: Int64Array,
    extra_capacity: int,
    bin_of: Int64Array,
) -> int:
    last, room, held, extra_room = -1, -1, 0, 0
    for document in range(len(sizes)):
        size = sizes[document]
        second = extra[document] if len(extra) else 0
        if size > room or held == max_documents or second > extra_room:
            last, room, held, extra_room = last + 1, capacity, 0, extra_capacity
        room -= size
        held += 1
        extra_room -= second
        bin_of[document] = last
    return last + 1


def _first_fit_by(order: Int64Array, sizes: Int64Array, rules: Rules) -> tuple[Int64Array, int]:
    bin_of = np.empty(len(sizes), np.int64)
    count = _first_fit(order, sizes, rules.capacity, rules.max_documents, rules.extra, rules.extra_capacity, bin_of)
    return bin_of, count


@jit
def _first_fit(
    order: Int64Array,
    sizes: Int64Array,
    capacity: int,
    max_documents: int,
    extra: Int64Array,
    extra_capacity: int,
    bin_of: Int64Array,
) -> int:
    """Bins are the leaves of a complete binary tree whose nodes hold the most room, and the most of the second
    resource, of the bins under them. A leaf that is not opened yet has all of both."""
    leaves = 1
    rooms = np.full((2, 2), capacity, np.int64)
    rooms[:, 1] = extra_capacity
    held = np.zeros(1, np.int64)
    num_bins = 0
    at = 0
    while at < len(order):
        size = sizes[order[at]]
        second = extra[order[at]] if len(extra) else 0
        leaf = _lowest_leaf(rooms, leaves, size, second)
        while leaf < 0:
            rooms, held = _doubled(rooms, held, capacity, extra_capacity)
            leaves *= 2
            leaf = _lowest_leaf(rooms, leaves, size, second)
        num_bins = max(num_bins, leaf + 1)
        node = leaves + leaf
        alike = True
        while alike:  # the next document, where it is alike, belongs here too as long as it fits
            bin_of[order[at]] = leaf
            at += 1
            held[leaf] += 1
            rooms[node, 0] = rooms[node, 0] - size if held[leaf] < max_documents else -1
            rooms[node, 1] -= second
            alike = at < len(order) and sizes[order[at]] == size and rooms[node, 0] >= size and not len(extra)
        _update(rooms, node)
    return num_bins


@jit
def _lowest_leaf(rooms: Int64Array, leaves: int, size: int, second: int) -> int:
    """The lowest leaf that holds both, or −1: down on the left, from a dead end to the next subtree on the right."""
    node = 1
    while True:
        if rooms[node, 0] >= size and rooms[node, 1] >= second:
            if node >= leaves:
                return node - leaves
            node *= 2
            continue
        while node & 1:  # the last of its parent
            node >>= 1
        if node == 0:
            return -1
        node += 1


@jit
def _update(rooms: Int64Array, node: int) -> None:
    """Carry a leaf's change up, as far as it is felt."""
    node >>= 1
    while node >= 1:
        most = max(rooms[2 * node, 0], rooms[2 * node + 1, 0])
        second = max(rooms[2 * node, 1], rooms[2 * node + 1, 1])
        if rooms[node, 0] == most and rooms[node, 1] == second:
            return
        rooms[node, 0], rooms[node, 1] = most, second
        node >>= 1


@jit
def _doubled(rooms: Int64Array, held: Int64Array, capacity: int, extra_capacity: int) -> tuple[Int64Array, Int64Array]:
    """The same bins under a tree with twice the leaves."""
    leaves = len(held)
    grown = np.full((4 * leaves, 2), capacity, np.int64)
    grown[:, 1] = extra_capacity
    grown[2 * leaves : 3 * leaves] = rooms[leaves:]
    for node in range(2 * leaves - 1, 0, -1):
        grown[node, 0] = max(grown[2 * node, 0], grown[2 * node + 1, 0])
        grown[node, 1] = max(grown[2 * node, 1], grown[2 * node + 1, 1])
    more = np.zeros(2 * leaves, np.int64)
    more[:leaves] = held
    return grown, more


@jit
def _fill_in_order(
    sizes: Int64Array,
    values: Int64Array,
    ranks: Int64Array,
    capacity: int,
    lookahead: int,
    max_documents: int,
    extra: Int64Array,
    extra_capacity: int,
    bin_of: Int64Array,
) -> int:
    """Unplaced documents in sight are queues by size: `head[rank]`, `tail[rank]`, `after[document]`. Sizes with a queue
    are marked in a tree of bits, the largest first, so that "the largest that fits" is one look-up. A document that is
    placed is always the head of its queue."""
    largest = len(values) - 1
    words, starts = room_index(max(largest, 0))
    head, tail = np.full((2, len(values)), -1, np.int64)
    after = np.full(len(sizes), -1, np.int64)
    first, seen, num_bins = 0, 0, 0
    while first < len(sizes):
        room, held, extra_room = capacity, 0, extra_capacity
        document = first
        while document >= 0:
            bin_of[document] = num_bins
            room -= sizes[document]
            held += 1
            if len(extra):
                extra_room -= extra[document]
            if document < seen:
                rank = ranks[document]
                head[rank] = after[document]
                if head[rank] < 0:
                    unmark(words, starts, largest - rank)
            while first < len(sizes) and bin_of[first] >= 0:
                first += 1
            seen = _look_ahead(words, starts, ranks, head, tail, after, largest, seen, first + 1 + lookahead, bin_of)
            document = -1
            if held < max_documents:
                document = _longest_fitting(words, starts, values, head, room, extra, extra_room)
        num_bins += 1
    return num_bins


@jit
def _look_ahead(
    words: Words,
    starts: Int64Array,
    ranks: Int64Array,
    head: Int64Array,
    tail: Int64Array,
    after: Int64Array,
    largest: int,
    seen: int,
    until: int,
    bin_of: Int64Array,
) -> int:
    """Queue the documents that come into sight, from `seen` up to `until`; returns how many have been seen then."""
    for document in range(seen, min(until, len(ranks))):
        if bin_of[document] >= 0:  # the very first of a bin, when nothing was in sight
            continue
        rank = ranks[document]
        if head[rank] < 0:
            head[rank] = document
            mark(words, starts, largest - rank)
        else:
            after[tail[rank]] = document
        tail[rank] = document
    return max(seen, min(until, len(ranks)))


@jit
def _longest_fitting(
    words: Words,
    starts: Int64Array,
    values: Int64Array,
    head: Int64Array,
    room: int,
    extra: Int64Array,
    extra_room: int,
) -> int:
    """The earliest document of the largest size that fits, or −1; with a second resource the first of up to 64 sizes
    whose earliest document fits both."""
    largest = len(values) - 1
    place = largest + 1 - int(np.searchsorted(values, room, side="right"))  # of the largest size up to `room`
    for _ in range(CANDIDATES_LOOKED_AT):
        place = least_room(words, starts, place) if place <= largest else -1
        if place < 0:
            return -1
        document = int(head[largest - place])
        if not len(extra) or extra[document] <= extra_room:
            return document
        place += 1
    return -1
