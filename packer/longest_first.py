"""Longest processing time first (Graham 1969): items from the dearest to the cheapest, each to the least loaded part.

The parts are the leaves of a tournament, whose winner is the least loaded one. A part may be limited in items and in
tokens; a full part leaves the tournament. An item that the winner has no room for goes to the least loaded part that
has. Nothing that was placed is moved again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array

OUT = np.iinfo(np.int64).max  # load of a leaf that is out of the tournament; sums stay under 2**62


class Limits(NamedTuple):
    """Every part takes `quota` items, and `extra` of them one more; none takes more than `capacity` tokens."""

    quota: int
    extra: int
    capacity: int


@jit
def place(costs: Int64Array, order: Int64Array, loads: Int64Array, part_of: Int64Array) -> None:
    """Fill `part_of` and raise `loads`; no limits."""
    keys, winners = _tournament(loads)
    for item in order:
        part = winners[1]
        part_of[item] = part
        loads[part] += costs[item]
        _replay(keys, winners, part, loads[part])


@jit
def place_within(
    costs: Int64Array, tokens: Int64Array, order: Int64Array, parts: int, limits: Limits, part_of: Int64Array
) -> int:
    """Fill `part_of`; returns the item that no part has room for, or -1 where all are placed."""
    loads, held, counts = np.zeros(parts, np.int64), np.zeros(parts, np.int64), np.zeros(parts, np.int64)
    keys, winners = _tournament(loads)
    extra = limits.extra
    for item in order:
        part = _least_loaded(keys, winners, held, limits.capacity - tokens[item])
        if part < 0:
            return int(item)
        part_of[item] = part
        loads[part] += costs[item]
        held[part] += tokens[item]
        counts[part] += 1
        extra -= counts[part] > limits.quota
        full = counts[part] > limits.quota or (counts[part] == limits.quota and extra == 0)
        _replay(keys, winners, part, OUT if full else loads[part])
        if counts[part] > limits.quota and extra == 0:
            _close(keys, winners, counts, limits.quota)
    return -1


@jit
def _tournament(loads: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Keys and winners of a tree: the root is node 1, the children of node i are 2i and 2i + 1, the leaves come last.
    The lighter child wins, and the left one, of the lower part, where they are equal."""
    width = 1
    while width < len(loads):
        width *= 2
    keys, winners = np.full(2 * width, OUT, np.int64), np.zeros(2 * width, np.int64)
    winners[width:] = np.arange(width)
    keys[width : width + len(loads)] = loads
    for node in range(width - 1, 0, -1):
        child = 2 * node + (keys[2 * node + 1] < keys[2 * node])
        keys[node], winners[node] = keys[child], winners[child]
    return keys, winners


@jit
def _replay(keys: Int64Array, winners: Int64Array, part: int, load: int) -> None:
    """Give a part another load and play its games again."""
    node = len(keys) // 2 + part
    keys[node] = load
    while node > 1:
        other = keys[node ^ 1]
        wins = load < other or (load == other and node & 1 == 0)
        part = part if wins else winners[node ^ 1]
        load = load if wins else other
        node >>= 1
        keys[node], winners[node] = load, part


@jit
def _least_loaded(keys: Int64Array, winners: Int64Array, held: Int64Array, most_held: int) -> int:
    """The least loaded part that holds at most so many tokens, or -1."""
    if keys[1] != OUT and held[winners[1]] <= most_held:
        return int(winners[1])
    best, load = -1, OUT
    for part in range(len(held)):
        key = keys[len(keys) // 2 + part]
        if key < load and held[part] <= most_held:
            best, load = part, key
    return best


@jit
def _close(keys: Int64Array, winners: Int64Array, counts: Int64Array, quota: int) -> None:
    """Take out the parts that have their quota, when no part may have more any longer."""
    for part in range(len(counts)):
        if counts[part] == quota:
            _replay(keys, winners, part, OUT)
