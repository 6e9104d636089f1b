"""What each rank does one after the other: rings when their last member arrives, whole documents in between.

A rank that waits for its next ring computes whole documents meanwhile, as many as fit into the wait; the rest comes
after its last ring. They are in micro-batches of their own, of at most `capacity` tokens, each of which costs `fixed`
beside its documents: in a ring's micro-batch they would hold up the other members. All members of a ring count it as
the same micro-batch (wave); a rank that has done less by then leaves out numbers.
"""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array


@jit
def arrange(
    capacity: int,
    fixed: int,
    ring_offsets: Int64Array,
    members: Int64Array,
    heights: Int64Array,
    starts: Int64Array,
    own_offsets: Int64Array,
    tokens: Int64Array,
    costs: Int64Array,
    ring_wave: Int64Array,
    wave: Int64Array,
) -> Int64Array:
    """Fill ring_wave [rings] and wave [whole documents]; returns how long each rank waits.

    Rings in the order in which they are placed: members of ring q are members[ring_offsets[q]:ring_offsets[q + 1]], it
    begins at starts[q] at the latest and takes each of them heights[q]. Whole documents of rank r, the dearest first:
    own_offsets[r] to own_offsets[r + 1].
    """
    ranks = len(own_offsets) - 1
    waits = np.zeros(ranks, np.int64)
    clock, following = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    wave[:] = -1
    for ring in range(len(ring_wave)):
        mine = members[ring_offsets[ring] : ring_offsets[ring + 1]]
        begin, number = 0, 0
        for rank in mine:
            own = slice(own_offsets[rank], own_offsets[rank + 1])
            clock[rank], following[rank] = _fill_wait(
                tokens[own], costs[own], wave[own], clock[rank], starts[ring], following[rank], capacity, fixed
            )
            begin, number = max(begin, clock[rank]), max(number, following[rank])
        ring_wave[ring] = number
        for rank in mine:
            waits[rank] += begin - clock[rank]
            clock[rank], following[rank] = begin + heights[ring], number + 1
    for rank in range(ranks):
        own = slice(own_offsets[rank], own_offsets[rank + 1])
        _append(tokens[own], wave[own], following[rank], capacity)
    return waits


@jit
def _fill_wait(
    tokens: Int64Array,
    costs: Int64Array,
    wave: Int64Array,
    clock: int,
    until: int,
    following: int,
    capacity: int,
    fixed: int,
) -> tuple[int, int]:
    """Place documents that end before `until`, the dearest first. The time then, and the number of the next
    micro-batch."""
    room = 0
    for document in range(len(tokens)):
        opens = room == 0 or tokens[document] > room
        if wave[document] >= 0 or clock + costs[document] + (fixed if opens else 0) > until:
            continue
        if opens:
            clock, room, following = clock + fixed, capacity, following + 1
        wave[document] = following - 1
        clock += costs[document]
        room -= tokens[document]
    return clock, following


@jit
def _append(tokens: Int64Array, wave: Int64Array, following: int, capacity: int) -> None:
    """Place what is left: each document into the first new micro-batch that has room."""
    rooms = np.empty(len(tokens), np.int64)
    count = 0
    for document in range(len(tokens)):
        if wave[document] >= 0:
            continue
        at = 0
        while at < count and rooms[at] < tokens[document]:
            at += 1
        if at == count:
            rooms[count] = capacity
            count += 1
        rooms[at] -= tokens[document]
        wave[document] = following + at
