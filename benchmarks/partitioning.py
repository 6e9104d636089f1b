"""Items spread over parts by `partition`, and a baseline for parts of equal counts.

The baseline is Karmarkar-Karp as verl does it, written anew, in Python as there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np

from seqmesh.benchmarks.harness import Results, count_ratio, measure, ratio, row
from seqmesh.benchmarks.lengths import SEED, WIDE_P99, web_lengths
from seqmesh.benchmarks.packing import SEQMESH, no_garbage_collection
from seqmesh.packer.balance import partition
from seqmesh.packer.lengths import Int64Array

EQUAL = "seqmesh, equal counts"
BASELINE = "Karmarkar-Karp, equal sizes (as verl does)"
LONGEST = 131_072
LINEAR_COST = 24_576  # of a token, where the cost of a document is that times its tokens, and their square

T = TypeVar("T")
Set = tuple[int, list[int]]  # summed cost, items
Heaviest = list[int]  # load of the heaviest part, by seed


@dataclass(order=True, slots=True)
class State:
    """One set for each part, by sum descending. The first popped has the largest spread, of equal ones that with the
    larger first set."""

    key: tuple[int, int] = field(init=False)
    sets: list[Set] = field(compare=False)

    def __post_init__(self) -> None:
        self.sets.sort(key=lambda each: each[0], reverse=True)
        self.key = (self.sets[-1][0] - self.sets[0][0], -self.sets[0][0])

    def merged(self, other: State) -> State:
        """The largest of one with the smallest of the other."""
        pairs = zip(self.sets, reversed(other.sets), strict=True)
        return State([(cost + more, items + others) for (cost, items), (more, others) in pairs])


def karmarkar_karp_equal(costs: list[int], parts: int) -> list[list[int]]:
    """The items of each part, as many in every one: largest differencing over groups of one item for each part.

    Raises ValueError where the items do not divide.
    """
    if not costs or len(costs) % parts:
        raise ValueError(f"{len(costs)} costs do not make {parts} parts of equal counts")
    order = sorted(range(len(costs)), key=costs.__getitem__)
    groups = (order[start : start + parts] for start in range(0, len(order), parts))
    states = [State([(costs[item], [item]) for item in group]) for group in groups]
    heapq.heapify(states)
    while len(states) > 1:
        heapq.heappush(states, heapq.heappop(states).merged(heapq.heappop(states)))
    return [items for _cost, items in states[0].sets]


def balancing(costs: Int64Array, parts: int, repeats: int) -> Results:
    """Items per CPU-second, parts with any counts and with equal ones."""
    options = {SEQMESH: False, EQUAL: True}
    found = {name: partition(costs, parts, equal_counts=equal) for name, equal in options.items()}
    calls = {name: _caller(costs, parts, equal) for name, equal in options.items()}
    case = f"partition {len(costs)} in {parts}"
    rows = [
        row(
            case,
            name,
            spread.rate(len(costs)),
            "items/CPU-s",
            imbalance=found[name].imbalance,
            over_bound=found[name].excess,
        )
        for name, spread in measure(calls, repeats).items()
    ]
    return Results(rows=tuple(rows))


def equal_parts(items: int, parts: int, seeds: int) -> Results:
    """CPU milliseconds per call over so many drawn sets of costs, and the set whose heaviest part is the farthest over
    the lower bound."""
    drawn = [document_costs(items, seed=SEED + seed) for seed in range(seeds)]
    bounds = [partition(costs, parts, equal_counts=True).lower_bound for costs in drawn]
    lists = [costs.tolist() for costs in drawn]
    ours: Heaviest = []
    theirs: Heaviest = []
    candidates = {
        SEQMESH: _each(iter(chain(drawn[:1], drawn)), lambda costs: heaviest(costs, parts), ours),
        BASELINE: _each(iter(chain(lists[:1], lists)), lambda costs: heaviest_baseline(costs, parts), theirs),
    }
    with no_garbage_collection():
        spreads = measure(candidates, seeds)
    case = f"partition_equal {items} in {parts}"
    rows = {
        name: row(case, name, spreads[name].scaled(1e3), "CPU-ms", seeds=seeds, **farthest(found[1:], bounds))
        for name, found in ((SEQMESH, ours), (BASELINE, theirs))
    }
    return Results(
        rows=tuple(rows.values()),
        ratios=(
            *(count_ratio("partition_equal", each, "over", "bound") for each in rows.values()),
            ratio("partition_equal_vs_karmarkar_karp", rows[BASELINE], rows[SEQMESH]),
        ),
    )


def document_costs(documents: int, *, seed: int) -> Int64Array:
    """24,576 s + s² for each document of s tokens, s drawn from the wide web-like distribution."""
    tokens = web_lengths(documents, LONGEST, p99=WIDE_P99, seed=seed)
    return LINEAR_COST * tokens + tokens * tokens


def heaviest(costs: Int64Array, parts: int) -> int:
    return int(partition(costs, parts, equal_counts=True).loads.max())


def heaviest_baseline(costs: list[int], parts: int) -> int:
    return max(sum(costs[item] for item in items) for items in karmarkar_karp_equal(costs, parts))


def farthest(found: Heaviest, bounds: list[int]) -> dict[str, int | float]:
    """Of the seed that is the farthest over its bound: by how much, and the bound. median_over: of all, a fraction."""
    over = [heaviest / bound - 1 for heaviest, bound in zip(found, bounds, strict=True)]
    worst = int(np.argmax(over))
    return {"over": found[worst] - bounds[worst], "bound": bounds[worst], "median_over": float(np.median(over))}


def _caller(costs: Int64Array, parts: int, equal: bool) -> Callable[[], None]:
    def call() -> None:
        partition(costs, parts, equal_counts=equal)

    return call


def _each(inputs: Iterator[T], solve: Callable[[T], int], found: Heaviest) -> Callable[[], None]:
    """A candidate that takes the next input at each call."""

    def call() -> None:
        found.append(solve(next(inputs)))

    return call
