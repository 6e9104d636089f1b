"""A first placement that keeps to the limits: how many items and how many tokens a part may have.

Tries, until one succeeds: dearest item first; tokens spread as evenly as possible; best fit; a short search through all
placements. Whether any placement exists is a hard problem, so a refusal means that these found none, unless the tokens
are more than all parts hold. How even the costs are is left to the refinement that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from seqmesh.packer.exchange import refine
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.longest_first import Limits, place_within
from seqmesh.packer.sorting import descending

NO_CAPACITY = 2**62  # no sum of tokens is over this
SEARCH_WORK = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """N items for `parts` parts. order [N]: from the dearest to the cheapest. tokens [N] count against the capacity.

    fewest: no part may have fewer items. bound: no partition's heaviest part is less.
    """

    costs: Int64Array
    tokens: Int64Array
    order: Int64Array
    parts: int
    fewest: int
    limits: Limits
    bound: int

    @property
    def limited(self) -> bool:
        return self.fewest > 0 or self.limits.extra > 0 or self.limits.capacity < NO_CAPACITY


def place_limited(job: Job) -> Int64Array:
    """The part of each item [N]. Raises ValueError where no placement is found, naming an item that has no room."""
    possible = int(job.tokens.sum()) <= job.parts * job.limits.capacity
    for attempt in ATTEMPTS if possible else ():
        part_of = attempt(job)
        if part_of is not None:
            return part_of
    raise ValueError(_refusal(job))


def improve(job: Job, part_of: Int64Array, *, good_enough: int) -> Int64Array:
    """Refine `part_of` in place, within the limits, until the heaviest part is good enough; the same array."""
    counts = np.bincount(part_of, minlength=job.parts)
    most = job.limits.quota + (job.limits.extra > 0)
    room = np.minimum(counts + counts // 8 + 8, most)  # where counts are free, some room for moves
    refine(
        job.costs,
        job.tokens,
        job.order,
        part_of,
        room,
        fewest=job.fewest,
        capacity=job.limits.capacity,
        bound=good_enough,
    )
    return part_of


def _dearest_first(job: Job) -> Int64Array | None:
    part_of = np.empty(len(job.costs), np.int64)
    stuck = place_within(job.costs, job.tokens, job.order, job.parts, job.limits, part_of)
    return part_of if stuck < 0 else None


def _even_tokens(job: Job) -> Int64Array | None:
    """Balance the tokens as if they were the costs; the capacity is what is good enough."""
    uncapped = job.limits._replace(capacity=NO_CAPACITY)
    by_tokens = replace(job, costs=job.tokens, order=descending(job.tokens), limits=uncapped)
    part_of = np.empty(len(job.tokens), np.int64)
    place_within(job.tokens, job.tokens, by_tokens.order, job.parts, uncapped, part_of)
    improve(by_tokens, part_of, good_enough=job.limits.capacity)
    return part_of if int(sums(job.tokens, part_of, job.parts).max()) <= job.limits.capacity else None


def _best_fit(job: Job) -> Int64Array | None:
    part_of = np.empty(len(job.costs), np.int64)
    stuck, _ = _place_best_fit(job.tokens, descending(job.tokens), job.parts, job.limits, part_of)
    return part_of if stuck < 0 else None


def _search(job: Job) -> Int64Array | None:
    part_of = np.full(len(job.costs), -1, np.int64)
    tries = SEARCH_WORK // job.parts**2  # the work of one try grows as the square of the parts
    found = _place_by_search(job.tokens, descending(job.tokens), job.parts, job.limits, part_of, tries)
    return part_of if found else None


ATTEMPTS: tuple[Callable[[Job], Int64Array | None], ...] = (_dearest_first, _even_tokens, _best_fit, _search)


def _refusal(job: Job) -> str:
    """What best fit has no room for. Where it did place all, it would have been taken."""
    part_of = np.empty(len(job.costs), np.int64)
    stuck, room = _place_best_fit(job.tokens, descending(job.tokens), job.parts, job.limits, part_of)
    return (
        f"item {stuck} has {int(job.tokens[stuck])} tokens: no part has room for it, the most room left in any of "
        f"{job.parts} parts is {room}; use more parts or a capacity over {job.limits.capacity}"
    )


@jit
def sums(values: Int64Array, part_of: Int64Array, parts: int) -> Int64Array:
    """Sum of the values in each part [parts]."""
    found = np.zeros(parts, np.int64)
    for item in range(len(values)):
        found[part_of[item]] += values[item]
    return found


@jit
def _open(count: int, extra: int, limits: Limits) -> bool:
    """Whether a part of so many items may have another one."""
    return count < limits.quota or (count == limits.quota and extra > 0)


@jit
def _place_best_fit(
    tokens: Int64Array, longest_first: Int64Array, parts: int, limits: Limits, part_of: Int64Array
) -> tuple[int, int]:
    """Each item into the fullest part that still holds it. An item that none holds, or -1, and the most room then."""
    held, counts, extra = np.zeros(parts, np.int64), np.zeros(parts, np.int64), limits.extra
    for item in longest_first:
        chosen, lightest = -1, -1
        for part in range(parts):
            if not _open(counts[part], extra, limits):
                continue
            if lightest < 0 or held[part] < held[lightest]:
                lightest = part
            if held[part] <= limits.capacity - tokens[item] and (chosen < 0 or held[part] > held[chosen]):
                chosen = part
        if chosen < 0:
            return item, limits.capacity - held[lightest]
        part_of[item] = chosen
        held[chosen] += tokens[item]
        extra -= counts[chosen] == limits.quota
        counts[chosen] += 1
    return -1, 0


@jit
def _place_by_search(
    tokens: Int64Array, longest_first: Int64Array, parts: int, limits: Limits, part_of: Int64Array, tries: int
) -> bool:
    """Depth first: each item into each part in turn. `part_of` starts with -1 for all."""
    held, counts, extra = np.zeros(parts, np.int64), np.zeros(parts, np.int64), limits.extra
    depth = 0
    for _ in range(tries):
        item = longest_first[depth]
        part = part_of[item]
        if part >= 0:
            held[part] -= tokens[item]
            counts[part] -= 1
            extra += counts[part] == limits.quota
        part = _next_part(held, counts, part + 1, tokens[item], extra, limits)
        part_of[item] = part
        if part < 0:
            depth -= 1
        else:
            held[part] += tokens[item]
            extra -= counts[part] == limits.quota
            counts[part] += 1
            depth += 1
        if depth < 0 or depth == len(longest_first):
            return depth > 0
    return False


@jit
def _next_part(held: Int64Array, counts: Int64Array, start: int, need: int, extra: int, limits: Limits) -> int:
    """The next part that holds the item and is not like one that was tried before; -1 for none."""
    for part in range(start, len(held)):
        if held[part] > limits.capacity - need or not _open(counts[part], extra, limits):
            continue
        seen = False
        for before in range(part):
            seen = seen or (held[before] == held[part] and counts[before] == counts[part])
        if not seen:
            return part
    return -1
