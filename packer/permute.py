"""A keyed bijection on 0..n−1: a global shuffle with no memory, any position in O(1).

A Feistel network over a grid of ⌈√n⌉ × ⌈n/⌈√n⌉⌉ cells: each round adds a keyed hash of one coordinate to the other,
which can be undone, so the whole is a bijection of the grid. The grid has fewer than ⌈√n⌉ cells beyond n; a value that
lands there is sent through again (cycle walking) and comes back in range.
"""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array

ROUNDS = 6  # three for each coordinate


@jit
def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on 64 bits, as a non-negative int64 of 63 bits."""
    z = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return int(z >> np.uint64(1))


@jit
def shuffle_key(seed: int, epoch: int) -> int:
    """The key of one epoch's order."""
    return mix64(mix64(seed) ^ epoch)


@jit
def permute(position: int, n: int, key: int) -> int:
    """The item at `position` of the order that `key` gives to 0..n−1."""
    rows = int(np.ceil(np.sqrt(n)))
    columns = (n + rows - 1) // rows
    at = position
    while True:
        row, column = at % rows, at // rows
        for i in range(ROUNDS):
            salt = mix64(key + i)
            if i % 2 == 0:
                row = (row + mix64(salt ^ column) % rows) % rows
            else:
                column = (column + mix64(salt ^ row) % columns) % columns
        at = column * rows + row
        if at < n:
            return at


@jit
def permute_inside(position: int, start: int, stop: int, key: int) -> int:
    """The same for start..stop−1."""
    return start + permute(position - start, stop - start, key)


@jit
def _fill(items: Int64Array, start: int, n: int, key: int) -> None:
    for i in range(len(items)):
        items[i] = permute(start + i, n, key)


def permutation(n: int, key: int, start: int = 0, stop: int | None = None) -> Int64Array:
    """Items start..stop−1 of the order that `key` gives to 0..n−1, as int64. Raises ValueError out of range."""
    stop = n if stop is None else stop
    if not 0 <= start <= stop <= n:
        raise ValueError(f"positions {start} to {stop} are not inside 0 to {n}")
    items = np.empty(stop - start, np.int64)
    if len(items):
        _fill(items, start, n, key)
    return items
