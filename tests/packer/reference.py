"""Slow and obvious versions of the packer's routines."""

from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[int]:
    """The textbook algorithm: every document, longest first, into the fullest bin that holds it. Bin loads."""
    loads: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b, load in enumerate(loads) if load + length <= capacity]
        if fitting:
            loads[max(fitting, key=lambda b: loads[b])] += length
        else:
            loads.append(length)
    return loads


def best_makespan(costs: Sequence[int], parts: int) -> int:
    """The optimum by trying everything; for a handful of items."""
    best = sum(costs)

    def place(item: int, loads: list[int]) -> None:
        nonlocal best
        if max(loads) >= best and item < len(costs):
            return
        if item == len(costs):
            best = min(best, max(loads))
            return
        for part in range(parts):
            loads[part] += costs[item]
            place(item + 1, loads)
            loads[part] -= costs[item]

    place(0, [0] * parts)
    return best
