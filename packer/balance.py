"""Balancing: which part (rank) gets which item, so that the heaviest part is as light as can be.

`partition(costs, parts)` gives each item a part; parts may be held to equal counts and to a capacity in tokens. Longest
processing time first (Graham 1969), which is at most 4/3 − 1/(3·parts) of the optimum where there are no limits, is
refined by moves and swaps between the heaviest part and lighter ones, and where few items go to each part largest
differencing (Karmarkar & Karp 1982) is tried as well. Items are not split or dropped, nothing is random, and the
optimum is not searched for: `lower_bound` says how far off it can be at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seqmesh.packer.differencing import largest_differencing
from seqmesh.packer.exchange import refine
from seqmesh.packer.lengths import Int64Array, as_integer, as_lengths
from seqmesh.packer.load_bound import heaviest_at_least
from seqmesh.packer.longest_first import Limits, place
from seqmesh.packer.placing import NO_CAPACITY, Job, improve, place_limited, sums
from seqmesh.packer.sorting import descending
from seqmesh.packer.totals import total

NEAR_SHIFT = 18  # within 2**-18 (0.0004 %) of the bound, more refinement is lost in the error of any cost model
DIFFERENCING_WORK = 2**17  # items × parts
DIFFERENCING_ITEMS = 32  # items per part; with more, the refined partition has nothing left to gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """part_of [N]: the part of each item. loads [parts]: summed cost. counts [parts]: number of items. All int64.

    lower_bound: no partition's heaviest is less; with equal counts, none of equal counts. It knows nothing of a
    capacity: where that is tight, the best partition there is may be far above.
    """

    part_of: Int64Array
    loads: Int64Array
    counts: Int64Array
    lower_bound: int

    @property
    def imbalance(self) -> float:
        """Heaviest part over the mean part, 1.0 where all are equal (and where there is no cost)."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0

    @property
    def excess(self) -> float:
        """By what fraction the heaviest part is over the lower bound; 0.0 for an optimum that is proven."""
        return float(self.loads.max()) / self.lower_bound - 1 if self.lower_bound else 0.0


def partition(
    costs: npt.ArrayLike,
    parts: int,
    *,
    equal_counts: bool = False,
    capacity: int | None = None,
    tokens: npt.ArrayLike | None = None,
    method: str = "best",
) -> Partition:
    """Spread items over `parts`; deterministic, ties go to the lowest part.

    costs [N]: what is balanced, integers in any unit. equal_counts: the numbers of items differ by at most one.
    capacity: the most tokens in one part. tokens [N]: of each item, by default its cost. method: `longest_first`
    (not refined), `refined`, `differencing` (not refined, no limits) or `best`.

    Raises ValueError for bad input (a part count or capacity below 1, costs or tokens that are negative, no integers,
    of unequal number or over 2**62 in sum, an unknown method) and where no placement within the capacity is found.
    """
    _check(parts, capacity, tokens, method)
    job = _job(as_lengths(costs, name="costs"), parts, equal_counts, capacity, tokens)
    if method == "differencing" and job.limited:
        raise ValueError("method 'differencing' knows no limits: use 'best' with equal_counts or a capacity")
    part_of = METHODS[method](job)
    return Partition(
        part_of=part_of,
        loads=sums(job.costs, part_of, parts),
        counts=np.bincount(part_of, minlength=parts).astype(np.int64, copy=False),
        lower_bound=job.bound,
    )


def spread(costs: Int64Array, loads: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Longest first onto parts that carry `loads` already, refined: the part of each item, and the loads afterwards."""
    order = descending(costs)
    part_of = np.empty(len(costs), np.int64)
    after = loads.copy()
    place(costs, order, after, part_of)
    even = _near(-(-int(after.sum()) // len(loads)))
    if len(costs) == 0 or int(after.max()) <= even:
        return part_of, after
    counts = np.bincount(part_of, minlength=len(loads))
    room = np.minimum(counts + counts // 8 + 8, len(costs))
    refine(costs, costs, order, part_of, room, fewest=0, capacity=NO_CAPACITY, bound=even, loads=loads)
    return part_of, loads + sums(costs, part_of, len(loads))


def _check(parts: int, capacity: int | None, tokens: npt.ArrayLike | None, method: str) -> None:
    as_integer("parts", parts, 1)
    if capacity is not None:
        as_integer("capacity", capacity, 1)
    if capacity is None and tokens is not None:
        raise ValueError("tokens are given without a capacity: give both or none")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: must be one of {', '.join(METHODS)}")


def _job(costs: Int64Array, parts: int, equal_counts: bool, capacity: int | None, tokens: npt.ArrayLike | None) -> Job:
    """Checked input, with what all methods need."""
    total(costs, "costs")
    order = descending(costs)
    quota, extra = divmod(len(costs), parts) if equal_counts else (len(costs), 0)
    fewest = quota if equal_counts else 0
    return Job(
        costs=costs,
        tokens=costs if capacity is None else _checked_tokens(costs, tokens, capacity),
        order=order,
        parts=parts,
        fewest=fewest,
        limits=Limits(quota, extra, NO_CAPACITY if capacity is None else min(capacity, NO_CAPACITY)),
        bound=heaviest_at_least(costs[order], parts, fewest),
    )


def _checked_tokens(costs: Int64Array, tokens: npt.ArrayLike | None, capacity: int) -> Int64Array:
    checked = costs if tokens is None else as_lengths(tokens, name="tokens")
    if len(checked) != len(costs):
        raise ValueError(f"{len(checked)} tokens for {len(costs)} costs: give one of each for every item")
    total(checked, "tokens")
    if len(checked) and int(checked.max()) > capacity:
        longest = int(checked.argmax())
        raise ValueError(
            f"item {longest} has {int(checked[longest])} tokens: more than the capacity, {capacity}; "
            "split it or use more capacity"
        )
    return checked


def _longest_first(job: Job) -> Int64Array:
    """Not refined."""
    if job.limited:
        return place_limited(job)
    part_of = np.empty(len(job.costs), np.int64)
    place(job.costs, job.order, np.zeros(job.parts, np.int64), part_of)
    return part_of


def _refined(job: Job) -> Int64Array:
    return _improved(job, _longest_first(job))


def _differencing(job: Job) -> Int64Array:
    return largest_differencing(job.costs, job.parts)


def _best(job: Job) -> Int64Array:
    """Refined, and where that leaves something to gain and it is affordable, differencing, which is refined as well."""
    part_of = _refined(job)
    heaviest = int(sums(job.costs, part_of, job.parts).max())
    affordable = len(job.costs) <= min(DIFFERENCING_ITEMS * job.parts, DIFFERENCING_WORK // job.parts)
    if job.limited or not affordable or heaviest <= _near(job.bound):
        return part_of
    other = _improved(job, _differencing(job))
    return other if int(sums(job.costs, other, job.parts).max()) < heaviest else part_of


METHODS: dict[str, Callable[[Job], Int64Array]] = {
    "best": _best,
    "refined": _refined,
    "longest_first": _longest_first,
    "differencing": _differencing,
}


def _improved(job: Job, part_of: Int64Array) -> Int64Array:
    if int(sums(job.costs, part_of, job.parts).max()) <= _near(job.bound):
        return part_of
    return improve(job, part_of, good_enough=_near(job.bound))


def _near(bound: int) -> int:
    return bound + (bound >> NEAR_SHIFT)
