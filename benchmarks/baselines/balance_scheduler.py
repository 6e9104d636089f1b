"""ByteScale's balance scheduler (its Algorithm 2): ranks run different numbers of micro-batches of like work.

In: lengths, a mesh, a cost model, ring sizes, and what the paper leaves open as `Options`. Out: an `Assignment`.
Documents by descending length are cut into buckets of about equal work. Round by round, the ranks that are behind the
busiest by more than a slack are the targets, and are given documents until they have caught up: from the first bucket
(DP-Balance; as buckets are emptied in order, they change nothing then) or from all buckets in turn (PP-Balance). Rings
are as small as memory allows, never larger.

Where the paper is silent:
* With no rank behind by more than the slack, at the start among others, all ranks are targets, for one item.
* What an item goes to are the least loaded targets, as many as its ring has; any ranks where targets are too few. It
  begins when the last of them is done.
* `per_round`: after so many items the targets are chosen anew, even if some have not caught up.
* Short documents become packs of the capacity before (`packs_first`), as in Algorithm 1, or are dealt one by one, and
  each rank fills its micro-batches in the order in which they come.
* A pack's place in the order is that of its longest document. Work is compute alone; links are not looked at.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from seqmesh.benchmarks.baselines.placement import Item, Placement, items_of
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import piece_tokens, smallest_rings
from seqmesh.packer.plan import Assignment, Mesh

Load = tuple[Item, int, int]  # an item, the work and the tokens of its dearest and largest piece
Bucket = deque[Load]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """slack: of the mean rank's work, by how much a rank may be behind. buckets: how many, of equal work."""

    balance: Literal["dp", "pp"] = "dp"
    slack: float = 0.05
    buckets: int = 8
    per_round: int | None = None
    packs_first: bool = True


def grid(slacks: tuple[float, ...] = (0.02, 0.2), buckets: tuple[int, ...] = (2, 4, 16)) -> list[Options]:
    """Options to take the best of: each only where it changes something. With items one by one the slack does not."""
    kinds: list[tuple[Literal["dp", "pp"], int]] = [("dp", 1), *(("pp", count) for count in buckets)]
    rounds: list[tuple[float, int | None]] = [(slacks[0], 1), *((slack, None) for slack in slacks)]
    return [
        Options(balance=balance, buckets=count, slack=slack, per_round=items, packs_first=first)
        for (balance, count), (slack, items), first in product(kinds, rounds, (True, False))
    ]


def balanced_hdp(
    lengths: Int64Array, mesh: Mesh, cost: CostModel, options: Options, *, rings: Int64Array | None = None
) -> Assignment:
    """Algorithm 2. rings: of each document, by default the smallest that hold them."""
    chosen = smallest_rings(lengths, mesh.capacity) if rings is None else rings
    loads = longest_first(lengths, chosen, mesh.capacity, cost, options.packs_first)
    slack = options.slack * sum(item.width * work for item, work, _tokens in loads) / mesh.ranks
    buckets, ranks = equal_buckets(loads, options.buckets), Ranks(mesh)
    while buckets:
        level = int(ranks.busy.max()) - slack
        targets, given = ranks.behind(level), 0
        while len(targets) and buckets and given != options.per_round:
            ranks.give(*take(buckets, options.balance), targets)
            targets = targets[ranks.busy[targets] < level]
            given += 1
    return ranks.placement.assignment()


def longest_first(
    lengths: Int64Array, rings: Int64Array, capacity: int, cost: CostModel, packs_first: bool
) -> list[Load]:
    """Rings and packs, or single documents, by the length of their longest document."""
    items = items_of(lengths, rings, capacity)
    if not packs_first:
        items = [Item(np.array([document]), item.width) for item in items for document in item.documents]
    items.sort(key=lambda item: (-int(lengths[item.documents].max()), int(item.documents[0])))
    first = np.zeros_like(lengths)  # members, which have the most up to rounding
    work, tokens = cost.of_pieces(lengths, rings, first), piece_tokens(lengths, rings, first)
    return [(item, int(work[item.documents].sum()), int(tokens[item.documents].sum())) for item in items]


def equal_buckets(loads: list[Load], count: int) -> list[Bucket]:
    """Consecutive items with about the same work in each of at most `count` buckets, none empty."""
    work = np.array([float(item.width * work) for item, work, _tokens in loads])
    before = np.cumsum(work) - work
    at = np.minimum((before * count / max(work.sum(), 1)).astype(int), count - 1)
    buckets = [deque(load for load, bucket in zip(loads, at, strict=True) if bucket == each) for each in range(count)]
    return [bucket for bucket in buckets if bucket]


def take(buckets: list[Bucket], balance: Literal["dp", "pp"]) -> Load:
    """The next item of the first bucket, which with PP-Balance then becomes the last; empty buckets go."""
    bucket = buckets.pop(0)
    load = bucket.popleft()
    if bucket:
        buckets.insert(0 if balance == "dp" else len(buckets), bucket)
    return load


class Ranks:
    """What ranks have been given. busy: when each is done."""

    def __init__(self, mesh: Mesh) -> None:
        self.placement = Placement()
        self.busy = np.zeros(mesh.ranks, np.int64)
        self.capacity = mesh.capacity
        self._waves = np.zeros(mesh.ranks, np.int64)  # micro-batches
        self._room = np.zeros(mesh.ranks, np.int64)  # tokens left in the last of them

    def behind(self, level: float) -> Int64Array:
        """Ranks that are done before `level`, or all where none is."""
        targets = np.flatnonzero(self.busy < level)
        return targets if len(targets) else np.arange(len(self.busy))

    def give(self, item: Item, work: int, tokens: int, targets: Int64Array) -> None:
        """Give an item to the least loaded of the targets."""
        among = targets if len(targets) >= item.width else np.arange(len(self.busy))
        chosen = among[[self.busy[among].argmin()]]
        if item.width > 1:
            chosen = np.sort(among[np.argsort(self.busy[among], kind="stable")[: item.width]])
        self.busy[chosen] = self.busy[chosen].max() + work
        self.placement.put(item.documents, chosen.tolist(), self._wave(chosen, tokens))

    def _wave(self, chosen: Int64Array, tokens: int) -> int:
        """The open micro-batch of a single rank if it has the room, else a new one of all ranks."""
        if len(chosen) > 1 or self._room[chosen[0]] < tokens:
            self._waves[chosen] = self._waves[chosen].max() + 1
            self._room[chosen] = self.capacity if len(chosen) == 1 else tokens  # a ring is alone
        self._room[chosen] -= tokens
        return int(self._waves[chosen[0]]) - 1
