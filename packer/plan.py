"""The step plan: which piece of which document every rank computes, in which wave. Columns of integers, no code.

Made by `mesh.plan_step`, checked by `check_plan`, carried out by the loader and the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import piece_tokens

Mode = Literal["free", "waves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step over R ranks, D documents and P pieces. Every array is int64.

    lengths [D]: tokens of each document. Pieces are sorted by rank, wave, rings before documents that are whole, then
    document; piece p is document[p] on rank[p] in micro-batch wave[p], member ring_index[p] of ring_size[p], and costs
    costs[p]. So all ranks meet rings in one order, that of (wave, document). The ranks of document d's ring, in order,
    are ring_ranks[ring_offsets[d]:ring_offsets[d + 1]]. waves [R]: micro-batches of each rank (0 for a rank without
    documents; the same for all in mode `waves`); one of them may hold nothing. supervised_tokens: what the step's loss
    is divided by. makespan: when the last rank is done; lower_bound: what no plan can beat, both in the cost's unit.
    """

    mode: Mode
    lengths: Int64Array
    document: Int64Array
    rank: Int64Array
    wave: Int64Array
    ring_size: Int64Array
    ring_index: Int64Array
    costs: Int64Array
    ring_offsets: Int64Array
    ring_ranks: Int64Array
    waves: Int64Array
    supervised_tokens: int
    makespan: int
    lower_bound: int

    @property
    def ranks(self) -> int:
        return len(self.waves)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def rings(self) -> int:
        """Documents that are spread over more than one rank."""
        return int(np.count_nonzero(np.diff(self.ring_offsets) > 1))

    @property
    def cost(self) -> Int64Array:
        """Summed cost of each rank's pieces [R]."""
        loads = np.zeros(self.ranks, np.int64)
        np.add.at(loads, self.rank, self.costs)
        return loads

    @property
    def gap(self) -> float:
        """Makespan over lower bound, minus one: 0.0 is provably optimal."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def imbalance(self) -> float:
        """Makespan over the mean rank's work: 1.0 where no rank ever waits."""
        mean = float(self.costs.sum()) / self.ranks
        return self.makespan / mean if mean else 1.0

    def pieces(self, rank: int, wave: int) -> Int64Array:
        """Piece numbers of one micro-batch."""
        first, last = np.searchsorted(self.rank, [rank, rank + 1])
        start, stop = np.searchsorted(self.wave[first:last], [wave, wave + 1])
        return np.arange(first + start, first + stop)

    def digest(self) -> str:
        """xxh3-128 of everything the ranks must agree on, in hexadecimal."""
        hasher = xxhash.xxh3_128(self.mode.encode())
        columns = (self.lengths, self.document, self.rank, self.wave, self.ring_size, self.ring_index)
        for column in (*columns, self.ring_offsets, self.ring_ranks, self.waves):
            hasher.update(np.int64(len(column)).tobytes())
            hasher.update(column.tobytes())
        hasher.update(np.int64(self.supervised_tokens).tobytes())
        return hasher.hexdigest()


def check_plan(plan: StepPlan, lengths: Int64Array, *, ranks: int, capacity: int) -> None:
    """Check a plan against what was asked, with none of the planner's code. Raises ValueError naming what is broken.

    Holds: the plan is for these lengths and ranks; every document is held whole by its ring, each member once; all
    members meet in the same wave; every rank meets rings in the order of (wave, document); no micro-batch is over
    capacity; the numbers of waves are those in use, and equal in mode `waves`.
    """
    if plan.ranks != ranks:
        raise ValueError(f"plan is for {plan.ranks} ranks: {ranks} were asked for")
    if not np.array_equal(plan.lengths, lengths):
        raise ValueError("plan is for other documents than were asked for")
    _check_rings(plan)
    _check_order(plan)
    held: dict[tuple[int, int], int] = {}
    for piece in range(len(plan.document)):
        place = int(plan.rank[piece]), int(plan.wave[piece])
        length = int(lengths[plan.document[piece]])
        held[place] = held.get(place, 0) + piece_tokens(length, int(plan.ring_size[piece]), int(plan.ring_index[piece]))
    for (rank, wave), tokens in held.items():
        if tokens > capacity:
            raise ValueError(f"rank {rank}, wave {wave} holds {tokens} tokens: more than the capacity, {capacity}")
    used = [max((wave + 1 for holder, wave in held if holder == rank), default=0) for rank in range(ranks)]
    expected = used if plan.mode == "free" else [max(used, default=0)] * ranks
    if plan.waves.tolist() != expected:
        raise ValueError(f"plan counts {plan.waves.tolist()} waves: {expected} are in use")


def _check_rings(plan: StepPlan) -> None:
    """Every document has one piece for each member of its ring, on the member's rank, all in one wave."""
    pieces_of: dict[int, list[int]] = {}
    for piece, document in enumerate(plan.document.tolist()):
        pieces_of.setdefault(document, []).append(piece)
    for document in range(len(plan.lengths)):
        ring = plan.ring_ranks[plan.ring_offsets[document] : plan.ring_offsets[document + 1]].tolist()
        if len(set(ring)) != len(ring) or not ring:
            raise ValueError(f"document {document} has no proper ring: {ring}")
        pieces = np.array(pieces_of.get(document, []), np.int64)
        members = sorted(zip(plan.ring_index[pieces].tolist(), plan.rank[pieces].tolist(), strict=True))
        if members != list(enumerate(ring)) or set(plan.ring_size[pieces].tolist()) != {len(ring)}:
            raise ValueError(f"document {document} is held by {members}: its ring is {ring}")
        if len(set(plan.wave[pieces].tolist())) != 1:
            raise ValueError(f"document {document} is spread over waves {plan.wave[pieces].tolist()}")


def _check_order(plan: StepPlan) -> None:
    """Pieces are sorted, so that no two ranks meet two rings in different orders."""
    keys = np.stack([plan.rank, plan.wave, plan.ring_size == 1, plan.document], axis=1).tolist()
    if keys != sorted(keys):
        raise ValueError("document order is broken: pieces are not sorted by rank, wave, rings first, document")
