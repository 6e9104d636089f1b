"""The step plan: which piece of which document every rank computes, in which wave. Columns of integers, no code.

Made by `mesh.plan_step` (or by hand with `make_plan`), checked by `check_plan`, carried out by the loader and the
trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import xxhash

from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.makespan import first_of_batches, lower_bound, timeline
from seqmesh.packer.offload import KEPT_LAYERS, Offload, memory_tokens, share_needed
from seqmesh.packer.pieces import piece_tokens
from seqmesh.packer.pipeline import pipeline_bound, pipelined
from seqmesh.packer.sorting import ascending_by

Mode = Literal["free", "waves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`ranks` model replicas, each holding at most `capacity` tokens in one micro-batch, `ranks_per_node` of them on
    fast links with each other (None: all).

    mode `free`: ranks may differ in their number of micro-batches. mode `waves`: all have as many as the one with the
    most, for engines that need equal counts. stages: of the pipeline that each replica is (mode `free`). offload:
    whether rings may be smaller because activations are moved to the host meanwhile (mode `free`).
    """

    ranks: int
    capacity: int
    mode: Mode = "free"
    ranks_per_node: int | None = None
    stages: int = 1
    offload: Offload | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "capacity", "ranks_per_node", "stages"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}: must be one of {', '.join(get_args(Mode))}")
        if self.mode == "waves" and (self.stages > 1 or self.offload):
            raise ValueError("stages and offload need mode 'free': in 'waves' all ranks wait for each other")

    @property
    def node(self) -> int:
        """Ranks of one node."""
        return self.ranks if self.ranks_per_node is None else min(self.ranks_per_node, self.ranks)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a micro-batch: the capacity, or what is left of it once all that can be is offloaded."""
        return self.capacity if self.offload is None else self.capacity * self.offload.layers // KEPT_LAYERS

    def lower_bound(self, lengths: Int64Array, cost: CostModel) -> int:
        """No plan for this mesh is faster, see `makespan.lower_bound` and `pipeline.pipeline_bound`."""
        if self.stages > 1:
            return pipeline_bound(lengths, self.ranks, self.most_tokens, cost, self.stages, per_node=self.node)
        return lower_bound(
            lengths, self.ranks, self.most_tokens, cost, per_node=self.node, barrier=self.mode == "waves"
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where pieces go. rings [D]: ring size of each document. document, index, rank, wave [P]: of each piece, in any
    order: piece `index` of the document's ring is on `rank` in micro-batch `wave`."""

    rings: Int64Array
    document: Int64Array
    index: Int64Array
    rank: Int64Array
    wave: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step over R ranks, D documents and P pieces. Every array is int64.

    lengths [D]: tokens of each document. Pieces are sorted by rank, wave, ring size from the largest, document; piece
    p is document[p] on rank[p] in micro-batch wave[p], member ring_index[p] of ring_size[p]. So all ranks meet rings
    in one order, that of (wave, ring size, document). It keeps its rank busy for costs[p]; the first piece of a
    micro-batch carries that one's fixed cost and exposed traffic too. Its micro-batch begins at begins[p] and ends at
    ends[p] in the simulation of the step (on the first of the pipeline's `stages`). The ranks of document d's ring,
    in order, are ring_ranks[ring_offsets[d]:ring_offsets[d + 1]]. waves [R]: micro-batches of each rank (0 for a rank
    without documents; the same for all in mode `waves`), some of which may hold nothing. offload[p]: what share of
    the activations of piece p's micro-batch is moved to the host, in 1/256. supervised_tokens: what the step's loss
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
    begins: Int64Array
    ends: Int64Array
    ring_offsets: Int64Array
    ring_ranks: Int64Array
    waves: Int64Array
    stages: int
    offload: Int64Array
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
        """Makespan over the mean work of a rank, or of a stage of its pipeline: 1.0 where none ever waits."""
        mean = float(self.costs.sum(dtype=np.float64)) / (self.ranks * self.stages)
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
        for column in (*columns, self.ring_offsets, self.ring_ranks, self.waves, self.offload):
            hasher.update(np.int64(len(column)).tobytes())
            hasher.update(column.tobytes())
        hasher.update(np.array([self.stages, self.supervised_tokens], np.int64).tobytes())
        return hasher.hexdigest()


def make_plan(
    lengths: Int64Array,
    assignment: Assignment,
    mesh: Mesh,
    cost: CostModel,
    *,
    supervised_tokens: int,
    bound: int | None = None,
) -> StepPlan:
    """The plan of an assignment: sorted, timed and bounded. bound: the mesh's lower bound where that is known. Nothing
    is checked, see `check_plan`."""
    a = assignment
    narrower = int(a.rings.max(initial=0)) - a.rings[a.document]
    order = ascending_by(a.rank, a.wave, narrower, a.document)
    document, index, rank, wave = a.document[order], a.index[order], a.rank[order], a.wave[order]
    ring_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(a.rings)])
    ring_ranks = np.empty(len(document), np.int64)
    ring_ranks[ring_offsets[document] + index] = rank
    columns = {"rank": rank, "wave": wave, "document": document, "ring_size": a.rings[document]}
    tokens = piece_tokens(lengths[document], columns["ring_size"], index)
    columns["costs"] = _costs(lengths[document], index, columns, leaves_node(ring_ranks, ring_offsets, mesh.node), cost)
    if mesh.stages > 1:
        begins, ends = pipelined(ranks=mesh.ranks, stages=mesh.stages, **columns)
    else:
        begins, ends = timeline(ranks=mesh.ranks, barrier=mesh.mode == "waves", **columns)
    return StepPlan(
        mode=mesh.mode,
        stages=mesh.stages,
        lengths=lengths,
        ring_index=index,
        begins=begins,
        ends=ends,
        ring_offsets=ring_offsets,
        ring_ranks=ring_ranks,
        waves=_waves(rank, wave, mesh),
        offload=_offload(tokens, rank, wave, mesh),
        supervised_tokens=supervised_tokens,
        makespan=int(ends.max(initial=0)),
        lower_bound=mesh.lower_bound(lengths, cost) if bound is None else bound,
        **columns,
    )


def leaves_node(ring_ranks: Int64Array, ring_offsets: Int64Array, per_node: int) -> Int64Array:
    """Whether (1 or 0) the ring of each document [D] leaves a node of `per_node` ranks."""
    if len(ring_offsets) == 1:
        return np.zeros(0, np.int64)
    node = ring_ranks // per_node
    lowest, highest = (reduce.reduceat(node, ring_offsets[:-1]) for reduce in (np.minimum, np.maximum))
    return (highest > lowest).astype(np.int64)


def _costs(
    lengths: Int64Array, index: Int64Array, columns: dict[str, Int64Array], far: Int64Array, cost: CostModel
) -> Int64Array:
    """What each piece keeps its rank busy for; pieces are sorted by rank and wave."""
    sizes, rank, wave = columns["ring_size"], columns["rank"], columns["wave"]
    attention = cost.attention(lengths, sizes, index)
    traffic = cost.traffic(lengths, sizes, index, far[columns["document"]])
    costs = cost.linear * piece_tokens(lengths, sizes, index) + attention
    if len(costs):
        first = first_of_batches(rank, wave)
        exposed = np.add.reduceat(traffic, first) - np.add.reduceat(attention, first)
        costs[first] += cost.fixed + np.maximum(exposed, 0)
    return np.asarray(costs, np.int64)


def _offload(tokens: Int64Array, rank: Int64Array, wave: Int64Array, mesh: Mesh) -> Int64Array:
    """The share that each piece's micro-batch must offload; pieces are sorted by rank and wave."""
    if mesh.offload is None or not len(tokens):
        return np.zeros(len(tokens), np.int64)
    first = first_of_batches(rank, wave)
    share = share_needed(np.add.reduceat(tokens, first), mesh.capacity, mesh.offload.layers)
    return np.repeat(share, np.diff(np.append(first, len(tokens))))


def _waves(rank: Int64Array, wave: Int64Array, mesh: Mesh) -> Int64Array:
    """Micro-batches of each rank."""
    waves = np.zeros(mesh.ranks, np.int64)
    np.maximum.at(waves, rank, wave + 1)
    return waves if mesh.mode == "free" else np.full(mesh.ranks, waves.max(initial=0))


def check_plan(plan: StepPlan, lengths: Int64Array, *, ranks: int, capacity: int, layers: int | None = None) -> None:
    """Check a plan against what was asked, with none of the planner's code. Raises ValueError naming what is broken.

    Holds: the plan is for these lengths and ranks; every document is held whole by its ring, each member once; all
    members meet in the same wave; every rank meets rings in the order of (wave, ring size, document); no micro-batch is
    over capacity, what of it is offloaded taken off where the model has `layers`; the numbers of waves are those in
    use, and equal in mode `waves`; nothing ends before it can.
    """
    if plan.ranks != ranks:
        raise ValueError(f"plan is for {plan.ranks} ranks: {ranks} were asked for")
    if not np.array_equal(plan.lengths, lengths):
        raise ValueError("plan is for other documents than were asked for")
    _check_rings(plan)
    _check_order(plan)
    used = _check_capacity(plan, capacity, layers)
    expected = used if plan.mode == "free" else [max(used, default=0)] * ranks
    if plan.waves.tolist() != expected:
        raise ValueError(f"plan counts {plan.waves.tolist()} waves: {expected} are in use")
    if plan.makespan != int(plan.ends.max(initial=0)) or plan.makespan < max(
        int(plan.cost.max()) // plan.stages, plan.lower_bound
    ):
        raise ValueError(f"plan's makespan is {plan.makespan}: not that of its pieces, or under the bound")


def _check_capacity(plan: StepPlan, capacity: int, layers: int | None) -> list[int]:
    """No micro-batch is over capacity; returns the number of waves that each rank uses."""
    held: dict[tuple[int, int], int] = {}
    share: dict[tuple[int, int], set[int]] = {}
    for piece in range(len(plan.document)):
        place = int(plan.rank[piece]), int(plan.wave[piece])
        length = int(plan.lengths[plan.document[piece]])
        held[place] = held.get(place, 0) + piece_tokens(length, int(plan.ring_size[piece]), int(plan.ring_index[piece]))
        share.setdefault(place, set()).add(int(plan.offload[piece]))
    for place, tokens in held.items():
        (offloaded,) = share[place]
        if offloaded and layers is not None:
            tokens = int(memory_tokens(np.array([tokens]), np.array([offloaded]), layers)[0])
        if tokens > capacity:
            rank, wave = place
            raise ValueError(f"rank {rank}, wave {wave} holds {tokens} tokens: more than the capacity, {capacity}")
    return [max((wave + 1 for holder, wave in held if holder == rank), default=0) for rank in range(plan.ranks)]


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
    keys = np.stack([plan.rank, plan.wave, -plan.ring_size, plan.document], axis=1).tolist()
    if keys != sorted(keys):
        raise ValueError("document order is broken: pieces are not sorted by rank, wave, ring size, document")
