"""Refinement of a partition: the heaviest part trades one item with a lighter part, or gives one away.

Takes parts whose items are listed from the dearest to the cheapest and improves them in place until the heaviest part
is as light as asked for, no single exchange makes it lighter, or the steps are used up. Keeps the fewest and the most
items of each part and the capacity in tokens. Looks for one exchange of at most one item each way, no longer chains.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array

LOOKS = 64  # at each item
MORE_LOOKS = 2**16  # for a few items


class Parts(NamedTuple):
    """Items of each part, the dearest first: those of part p are slots first[p] to first[p] + size[p] - 1.

    first [parts + 1], size, loads (cost), held (tokens) [parts]; costs, tokens, items [slots]. All int64. A part never
    gets more items than it has slots.
    """

    first: Int64Array
    size: Int64Array
    loads: Int64Array
    held: Int64Array
    costs: Int64Array
    tokens: Int64Array
    items: Int64Array


class Exchange(NamedTuple):
    """The slot that the heavier part gives (-1: there is no exchange), the one that it gets for it (-1: none), and how
    many items were looked at."""

    given: int
    got: int
    looked_at: int


def refine(
    costs: Int64Array,
    tokens: Int64Array,
    order: Int64Array,
    part_of: Int64Array,
    room: Int64Array,
    *,
    fewest: int,
    capacity: int,
    bound: int,
    loads: Int64Array | None = None,
    held: Int64Array | None = None,
) -> None:
    """Improve `part_of` [N] in place until its heaviest part has a load of at most `bound` or is stuck.

    order [N]: items from the dearest to the cheapest. room [parts]: the most items of each part; none ends with fewer
    than `fewest` either, and none gets more than `capacity` tokens. loads, held [parts]: cost and tokens that parts
    have besides the items, and that stay where they are; none by default.
    """
    if len(room) < 2 or len(order) == 0:
        return
    first = np.zeros(len(room) + 1, np.int64)
    np.cumsum(room, out=first[1:])
    none = np.zeros(len(room), np.int64)
    loads, held = none if loads is None else loads, none if held is None else held
    _refine(_listed(costs, tokens, order, part_of, first, loads, held), part_of, fewest, capacity, bound)


@jit
def _listed(
    costs: Int64Array,
    tokens: Int64Array,
    order: Int64Array,
    part_of: Int64Array,
    first: Int64Array,
    loads: Int64Array,
    held: Int64Array,
) -> Parts:
    """The parts as lists. Items are taken in order, so that each list is sorted."""
    parts, slots = len(first) - 1, first[-1]
    size, loads, held = np.zeros(parts, np.int64), loads.copy(), held.copy()
    slot_costs, slot_tokens = np.empty(slots, np.int64), np.empty(slots, np.int64)
    items = np.empty(slots, np.int64)
    for item in order:
        part = part_of[item]
        slot = first[part] + size[part]
        size[part] += 1
        loads[part] += costs[item]
        held[part] += tokens[item]
        slot_costs[slot], slot_tokens[slot], items[slot] = costs[item], tokens[item], item
    return Parts(first, size, loads, held, slot_costs, slot_tokens, items)


@jit
def _refine(parts: Parts, part_of: Int64Array, fewest: int, capacity: int, bound: int) -> None:
    """Relieve the heaviest part again and again. Each time it becomes lighter and no other part as heavy, so this ends;
    the limit on items looked at only keeps the time in proportion to the input."""
    ranked = np.argsort(parts.loads, kind="mergesort")
    looks, relieved = LOOKS * len(part_of) + MORE_LOOKS, True
    while relieved and looks > 0 and parts.loads[ranked[-1]] > bound:
        relieved, looked_at = _relieve(parts, part_of, ranked, fewest, capacity)
        looks -= looked_at
        _rank_again(ranked, parts.loads)


@jit
def _relieve(parts: Parts, part_of: Int64Array, ranked: Int64Array, fewest: int, capacity: int) -> tuple[bool, int]:
    """Exchange with the lightest part that makes the heaviest lighter. Whether one did, and the items looked at."""
    heavy, looked_at = ranked[-1], 0
    for light in ranked[:-1]:
        if parts.loads[heavy] - parts.loads[light] < 2:
            break
        found = _best_exchange(parts, heavy, light, fewest, capacity)
        looked_at += found.looked_at
        if found.given >= 0:
            _apply(parts, part_of, heavy, light, found)
            return True, looked_at
    return False, looked_at


@jit
def _best_exchange(parts: Parts, heavy: int, light: int, fewest: int, capacity: int) -> Exchange:
    """The exchange after which the heavier of the two parts is as light as one exchange can make it.

    A walk over both sorted lists: a difference too large asks for a cheaper item to give, one too small for a cheaper
    item to get. After its last item `light` offers nothing at all, where the counts allow a move.
    """
    moves = parts.size[heavy] > fewest and parts.first[light] + parts.size[light] < parts.first[light + 1]
    give, last_give = parts.first[heavy], parts.first[heavy] + parts.size[heavy]
    get, last_get = parts.first[light], parts.first[light] + parts.size[light]
    load, lighter_load = parts.loads[heavy], parts.loads[light]
    cheapest = 0 if moves or get == last_get else parts.costs[last_get - 1]
    best, given, got = load, -1, -1
    while give < last_give and get < last_get + moves and parts.costs[give] > cheapest:
        difference = parts.costs[give] - (parts.costs[get] if get < last_get else 0)
        left, risen = load - difference, lighter_load + difference
        slot = get if get < last_get else -1
        if max(left, risen) < best and _fits(parts, heavy, light, give, slot, capacity):
            best, given, got = max(left, risen), give, slot
        if risen > left:
            give += 1
        else:
            get += 1
    return Exchange(given, got, 1 + give - parts.first[heavy] + get - parts.first[light])


@jit
def _fits(parts: Parts, heavy: int, light: int, given: int, got: int, capacity: int) -> bool:
    """Whether both parts keep to the capacity."""
    tokens = parts.tokens[given] - (parts.tokens[got] if got >= 0 else 0)
    return bool(max(parts.held[heavy] - tokens, parts.held[light] + tokens) <= capacity)


@jit
def _apply(parts: Parts, part_of: Int64Array, heavy: int, light: int, exchange: Exchange) -> None:
    item = parts.items[exchange.given]
    cost, tokens = parts.costs[exchange.given], parts.tokens[exchange.given]
    _take(parts, heavy, exchange.given)
    if exchange.got >= 0:
        returned = parts.items[exchange.got]
        returned_cost, returned_tokens = parts.costs[exchange.got], parts.tokens[exchange.got]
        _take(parts, light, exchange.got)
        _put(parts, heavy, returned, returned_cost, returned_tokens)
        part_of[returned] = heavy
    _put(parts, light, item, cost, tokens)
    part_of[item] = light


@jit
def _take(parts: Parts, part: int, slot: int) -> None:
    """Remove the item in a slot; those after it move up."""
    parts.loads[part] -= parts.costs[slot]
    parts.held[part] -= parts.tokens[slot]
    parts.size[part] -= 1
    for at in range(slot, parts.first[part] + parts.size[part]):
        _copy(parts, at, at + 1)


@jit
def _put(parts: Parts, part: int, item: int, cost: int, tokens: int) -> None:
    """Insert an item where the list stays sorted."""
    at = parts.first[part] + parts.size[part]
    while at > parts.first[part] and parts.costs[at - 1] < cost:
        _copy(parts, at, at - 1)
        at -= 1
    parts.costs[at], parts.tokens[at], parts.items[at] = cost, tokens, item
    parts.loads[part] += cost
    parts.held[part] += tokens
    parts.size[part] += 1


@jit
def _copy(parts: Parts, to: int, source: int) -> None:
    parts.costs[to] = parts.costs[source]
    parts.tokens[to] = parts.tokens[source]
    parts.items[to] = parts.items[source]


@jit
def _rank_again(ranked: Int64Array, loads: Int64Array) -> None:
    """Insertion sort, since only two parts are out of place."""
    for at in range(1, len(ranked)):
        part = ranked[at]
        while at > 0 and loads[ranked[at - 1]] > loads[part]:
            ranked[at] = ranked[at - 1]
            at -= 1
        ranked[at] = part
