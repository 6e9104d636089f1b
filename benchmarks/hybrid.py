"""`seqmesh bench hybrid`: training steps of one model on the same documents, spread over ranks in five ways.

Real ranks (gloo), one thread each, run forward, backward and the reduction of whole steps of real document lengths:

* `static`: context parallelism of one degree for all documents, the one that holds the longest the job admits;
* `static per step`: of the degree that the longest document of each step asks for;
* `packed`: data parallelism of whole documents. A rank must hold the longest one: it has the memory of all ranks;
* `free`, `waves`: our plans.

All run the same model, kernels and exchanges, so that the plans alone differ; `waves` gathers its parameters in every
wave, all else replicates them. Every candidate's gradient is compared with that of `packed`. The time of a step is that
of the slowest rank; where ranks outnumber cores it says little. Each rank's own work is counted in CPU seconds of its
thread: the busiest rank's is how long a step takes where nobody shares a core, and what the others lack is idle time.
Bytes are counted as they are sent for attention, all ranks together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from seqmesh.benchmarks.baselines.static_mesh import static_mesh
from seqmesh.benchmarks.harness import Results, Spread, chosen_peers, ratio, row
from seqmesh.benchmarks.lengths import SEED, STEPS
from seqmesh.benchmarks.ranks import ask_ranks
from seqmesh.benchmarks.shards import random_shards, scratch_folder
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import largest_document
from seqmesh.packer.plan import Mesh, StepPlan, make_plan

PEERS: tuple[str, ...] = ()
MODULE = "seqmesh.benchmarks.hybrid_rank"
STATIC, PER_STEP, PACKED, FREE, WAVES = "static", "static per step", "packed", "free", "waves"
CANDIDATES = (STATIC, PER_STEP, PACKED, FREE, WAVES)
VOCABULARY = 2_048
K = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Steps of a named list of lengths. capacity, tokens: of a rank's micro-batch, of a step."""

    lengths: str
    ranks: int
    capacity: int
    tokens: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.lengths}, {self.ranks} x {self.capacity // K}K, {self.tokens // K}K"

    @property
    def longest(self) -> int:
        """Tokens of the longest document that the job admits."""
        return largest_document(self.ranks, self.capacity)

    def draw(self) -> list[Int64Array]:
        return [STEPS[self.lengths](self.tokens, self.longest, SEED + step) for step in range(self.steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What ranks are asked: run each step's documents [D] of `data`, in order, by every candidate's plan, `repeats`
    times, with a model of these settings."""

    data: str
    model: dict[str, int]
    capacity: int
    longest: int
    steps: tuple[tuple[int, ...], ...]
    candidates: tuple[str, ...]
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """By candidate. seconds: of each repeat of all steps, on the slowest rank. busy [R]: CPU seconds of each rank in
    one repeat, the lowest; busiest: of the busiest rank of each step, summed. sent: bytes. error: largest relative
    difference of a step's gradient from that of the packed plan."""

    seconds: dict[str, list[float]]
    busy: dict[str, list[float]]
    busiest: dict[str, list[float]]
    sent: dict[str, int]
    error: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """width, layers: of the model."""

    width: int
    layers: int
    cases: tuple[Case, ...]
    repeats: int


QUICK = Size(
    width=64,
    layers=2,
    cases=(Case(lengths="python_env", ranks=2, capacity=K, tokens=8 * K, steps=2),),
    repeats=2,
)
FULL = Size(
    width=128,
    layers=2,
    cases=tuple(
        Case(lengths=lengths, ranks=ranks, capacity=4 * K, tokens=ranks * 8 * K, steps=2)
        for lengths in ("python_env", "wlbllm", "prolong")
        for ranks in (2, 4)
    ),
    repeats=2,
)


def plan_of(candidate: str, lengths: Int64Array, capacity: int, longest: int, ranks: int, cost: CostModel) -> StepPlan:
    """The candidate's plan of one step; every rank computes the same."""
    mesh = Mesh(ranks=ranks, capacity=capacity, mode="waves" if candidate == WAVES else "free")
    if candidate in (FREE, WAVES):
        return plan_step(lengths, mesh, cost)
    if candidate == PACKED:
        mesh = Mesh(ranks=ranks, capacity=longest)
    assignment = static_mesh(lengths, mesh, context=longest if candidate == STATIC else None, by_tokens=True)
    return make_plan(lengths, assignment, mesh, cost, supervised_tokens=int(np.maximum(lengths - 1, 0).sum()))


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Measure every case."""
    chosen_peers(PEERS, against)
    size, results = QUICK if quick else FULL, Results()
    for case in size.cases:
        results += compare(case, ask(case, size))
    return results


def ask(case: Case, size: Size) -> Answer:
    """Have ranks run the case."""
    steps = case.draw()
    with scratch_folder(16 * case.tokens * case.steps) as scratch:
        random_shards(scratch / "set", np.concatenate(steps), vocab_size=VOCABULARY)
        job = Job(
            data=str(scratch / "set"),
            model={
                "vocab_size": VOCABULARY,
                "width": size.width,
                "layers": size.layers,
                "heads": size.width // 32,
                "kv_heads": size.width // 64,
            },
            capacity=case.capacity,
            longest=case.longest,
            steps=tuple(tuple(lengths.tolist()) for lengths in steps),
            candidates=CANDIDATES,
            repeats=size.repeats,
        )
        return TypeAdapter(Answer).validate_json(ask_ranks(MODULE, asdict(job), case.ranks))


def compare(case: Case, answer: Answer) -> Results:
    """Times, work and bytes, and how ours stand to the others'."""
    crowded = case.ranks > len(os.sched_getaffinity(0))
    note = "ranks share cores" if crowded else ""
    walls, works, sent = {}, {}, {}
    for name in answer.seconds:
        busy = answer.busy[name]
        wall = row(case.name, name, Spread.of(answer.seconds[name]).scaled(1 / case.steps), "s/step")
        walls[name] = replace(wall, note=note)
        works[name] = row(
            f"{case.name}, busiest rank",
            name,
            Spread.of(answer.busiest[name]).scaled(1 / case.steps),
            "CPU-s/step",
            idle=round(1 - sum(busy) / len(busy) / (min(answer.busiest[name]) or 1.0), 4),
            gradient_error=answer.error[name],
        )
        count = answer.sent[name] / case.steps
        sent[name] = row(f"{case.name}, sent", name, Spread.of([count]), "bytes/step")
    ratios = [
        ratio(f"{figure}_{ours}_vs_{other.replace(' ', '_')}", rows[ours], rows[other])
        for ours in (FREE, WAVES)
        for other in (STATIC, PER_STEP, PACKED)
        for figure, rows in (("step", walls), ("work", works), ("bytes", sent))
        if rows is not sent or rows[other].value
    ]
    return Results(rows=(*walls.values(), *works.values(), *sent.values()), ratios=tuple(ratios))


def documents_of(steps: Sequence[Sequence[int]]) -> list[Int64Array]:
    """Rows of the set that each step takes [D]."""
    ends = np.cumsum([len(step) for step in steps])
    return [np.arange(end - len(step), end) for step, end in zip(steps, ends.tolist(), strict=True)]
