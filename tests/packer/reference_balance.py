"""Slow and obvious versions of what `partition` does, and a reading of its answers."""

import itertools
from collections.abc import Sequence


def longest_first(costs: Sequence[int], parts: int) -> list[int]:
    """Part of each item: dearest first, each to the least loaded part, ties to the lower index."""
    loads = [0] * parts
    part_of = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        part = min(range(parts), key=lambda p: (loads[p], p))
        part_of[item] = part
        loads[part] += costs[item]
    return part_of


def heaviest_by_differencing(costs: Sequence[int], parts: int) -> int:
    """Largest differencing with `parts` sums for every state, as in the textbook. The heaviest sum.

    States of equal spread are combined the oldest first.
    """
    states = [([cost] + [0] * (parts - 1), age) for age, cost in enumerate(costs)]
    age = len(costs)
    while len(states) > 1:
        states.sort(key=lambda state: (state[0][-1] - state[0][0], state[1]))
        (first, _), (second, _), *states = states
        states.append((sorted((a + b for a, b in zip(first, reversed(second), strict=True)), reverse=True), age))
        age += 1
    return states[0][0][0] if states else 0


def loads_of(values: Sequence[int], part_of: Sequence[int], parts: int) -> list[int]:
    """The sum of the values in each part."""
    return [sum(v for v, p in zip(values, part_of, strict=True) if p == part) for part in range(parts)]


def exchange_helps(costs: Sequence[int], part_of: Sequence[int], parts: int) -> bool:
    """Whether every heaviest part becomes lighter, and no other as heavy, by one move or one swap."""
    loads = loads_of(costs, part_of, parts)
    members = [[c for c, p in zip(costs, part_of, strict=True) if p == part] for part in range(parts)]

    def helps(heavy: int, light: int) -> bool:
        pairs = itertools.product(members[heavy], [0, *members[light]])
        return any(0 < given - got < loads[heavy] - loads[light] for given, got in pairs)

    heaviest = [part for part in range(parts) if loads[part] == max(loads)]
    return all(any(helps(heavy, light) for light in range(parts)) for heavy in heaviest)


def best_heaviest(
    costs: Sequence[int],
    parts: int,
    *,
    equal_counts: bool = False,
    tokens: Sequence[int] | None = None,
    capacity: int | None = None,
) -> int | None:
    """The lightest heaviest part of all placements that keep to the limits, or None where there is none."""
    best: int | None = None
    sizes = {len(costs) // parts, -(-len(costs) // parts)}
    for part_of in itertools.product(range(parts), repeat=len(costs)):
        loads, held, counts = [0] * parts, [0] * parts, [0] * parts
        for item, part in enumerate(part_of):
            loads[part] += costs[item]
            held[part] += tokens[item] if tokens is not None else costs[item]
            counts[part] += 1
        allowed = (not equal_counts or set(counts) <= sizes) and (capacity is None or max(held) <= capacity)
        if allowed and (best is None or max(loads) < best):
            best = max(loads)
    return best
