"""A set of rooms, the tokens that are still free in bins, that answers "the smallest of at least so much" in O(1).

A 64-ary tree of bits over the values 0 to capacity: a bit of level h + 1 says that the word under it on level h is not
zero. Word i of level h is `words[starts[h] + i]`. For use inside compiled routines; nothing is checked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from seqmesh.packer.jit import jit, trailing_zeros
from seqmesh.packer.lengths import Int64Array

WORD_BITS = 64
LARGEST_INDEX = 1 << 24  # tokens of capacity: beyond that, tables with an entry for each room are not worth the memory

Words = npt.NDArray[np.uint64]


@jit
def room_index(capacity: int) -> tuple[Words, Int64Array]:
    """An empty set of rooms from 0 to capacity, as its words and the start of each level."""
    sizes = [capacity // WORD_BITS + 1]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] - 1) // WORD_BITS + 1)
    starts = np.zeros(len(sizes) + 1, np.int64)
    for height in range(len(sizes)):
        starts[height + 1] = starts[height] + sizes[height]
    return np.zeros(starts[-1], np.uint64), starts


@jit
def mark(words: Words, starts: Int64Array, room: int) -> None:
    """Say that some bin has this much room; where a word had a bit already, those above it are set."""
    for height in range(len(starts) - 1):
        word = starts[height] + (room >> 6)
        known = words[word] != 0
        words[word] |= np.uint64(1) << np.uint64(room & 63)
        if known:
            return
        room >>= 6


@jit
def unmark(words: Words, starts: Int64Array, room: int) -> None:
    """Say that no bin has this much room any more; an upper bit falls only with the last bit under it."""
    for height in range(len(starts) - 1):
        word = starts[height] + (room >> 6)
        words[word] &= ~(np.uint64(1) << np.uint64(room & 63))
        if words[word]:
            return
        room >>= 6


@jit
def least_room(words: Words, starts: Int64Array, need: int) -> int:
    """The smallest marked room of at least `need`, or -1: up the levels until a word has a bit, then down to it."""
    at = need
    for height in range(len(starts) - 1):
        word = starts[height] + (at >> 6)
        if word >= starts[height + 1]:
            return -1
        bits = words[word] >> np.uint64(at & 63)
        if bits:
            at += trailing_zeros(bits)
            for below in range(height - 1, -1, -1):
                at = (at << 6) + trailing_zeros(words[starts[below] + at])
            return at
        at = (at >> 6) + 1
    return -1
