"""A block shuffle: of items that lie in parts, such as files, only a window of parts is needed at a time.

The parts are put in a keyed random order and cut into windows, as equal as can be, since a short one would be mixed
badly; the items of a window are permuted by a key of its own. Like `permute` this is a function of the position: no
buffers, any position in O(log parts), from a table with a row for each part. Each part belongs to one window, so it is
needed during one stretch of the order only.
"""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.permute import mix64, permutation, permute_inside

START, FIRST, OPENS, CLOSES = range(4)  # columns of a table


def block_table(first: Int64Array, window: int, key: int) -> Int64Array:
    """The parts in the order that `key` gives to them, int64 [Q, 4]: position where the part's items would begin if
    windows were not shuffled, its first item, position where its window opens, and where that closes.

    first [Q + 1]: the first item of each part, and the number of items; no part is empty. window: most parts of one, at
    least 1.
    """
    parts = len(first) - 1
    order = permutation(parts, key)
    starts = np.zeros(parts + 1, np.int64)
    np.cumsum(np.diff(first)[order], out=starts[1:])
    bounds = np.arange(count_windows(parts, window) + 1) * parts // max(count_windows(parts, window), 1)
    opens, closes = (np.repeat(starts[each], np.diff(bounds)) for each in (bounds[:-1], bounds[1:]))
    return np.stack([starts[:-1], first[order], opens, closes], axis=1)


def count_windows(parts: int, window: int) -> int:
    """How many there are. window: most parts of one."""
    return -(-parts // window)


@jit
def block_at(position: int, table: Int64Array) -> int:
    """The last row of a table that starts at a position, or before it."""
    low, high = 0, len(table)
    while high - low > 1:
        middle = (low + high) // 2
        if table[middle, START] <= position:
            low = middle
        else:
            high = middle
    return low


@jit
def window_at(position: int, key: int, table: Int64Array) -> tuple[int, int, int]:
    """Positions from which and to which the window around one lasts, and its key. key: that of the table."""
    row = block_at(position, table)
    opens, closes = table[row, OPENS], table[row, CLOSES]
    return opens, closes, int(np.int64(mix64(key ^ opens)))  # as 64 signed bits, as other keys are


@jit
def item_at(place: int, table: Int64Array) -> int:
    """The item at a place of the order as it would be if windows were not shuffled."""
    row = block_at(place, table)
    return int(place - table[row, START] + table[row, FIRST])


@jit
def _fill(items: Int64Array, key: int, table: Int64Array) -> None:
    position = 0
    while position < len(items):
        window = window_at(position, key, table)
        while position < window[1]:
            items[position] = item_at(permute_inside(position, *window), table)
            position += 1


def block_permutation(first: Int64Array, window: int, key: int) -> Int64Array:
    """The whole order, as int64. Arguments as for `block_table`."""
    items = np.empty(int(first[-1]), np.int64)
    _fill(items, key, block_table(first, window, key))
    return items
