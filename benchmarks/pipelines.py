"""`seqmesh bench pipeline`: steps of one model on pipelines, the same documents spread and ordered in four ways.

Real processes (gloo), one thread each, run forward and backward of whole steps of real document lengths:

* `pipeline`: our plans for pipelines, replicas with different counts of micro-batches, alike in time;
* `levels`: our plans for replicas of one process, in their order of micro-batches;
* `DP-Balance`, `PP-Balance`: ByteScale's balance scheduler for either, with the options that the prediction rates best.

All run the same schedule, kernels and exchanges. A bubble is the share of the processes' time in which they have
nothing to do: 1 − their work over processes × the step. Work is CPU seconds of a process's thread. `predicted`: by the
planner's simulation, with a cost model fitted to micro-batches of this model on this machine; of stages it knows only
how many there are. `replayed`: with the work that was measured of each operation, as if every process had a core of
its own, see `replay`. `wall`: as it was; that says nothing where processes outnumber cores, or other work runs.

`sent`: bytes of one step on grids of replicas, tensor peers and stages, by what they cross, counted and by formula, see
`volumes`.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np
from pydantic import TypeAdapter

from seqmesh.benchmarks import volumes
from seqmesh.benchmarks.baselines.balance_scheduler import balanced_hdp, grid
from seqmesh.benchmarks.harness import Results, Row, Spread, chosen_peers, ratio, row
from seqmesh.benchmarks.lengths import SEED, STEPS
from seqmesh.benchmarks.ranks import ask_ranks
from seqmesh.benchmarks.shards import random_shards, scratch_folder
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import largest_document
from seqmesh.packer.plan import Assignment, Mesh, StepPlan, make_plan
from seqmesh.trainer.grid import ParallelConfig

PEERS: tuple[str, ...] = ()
MODULE, VOLUMES = "seqmesh.benchmarks.pipelines_rank", "seqmesh.benchmarks.volumes_rank"
OURS, LEVELS, DP, PP = "pipeline", "levels", "DP-Balance", "PP-Balance"
WALL, REPLAYED, PREDICTED = "wall", "replayed", "predicted"
CANDIDATES = (OURS, LEVELS, DP, PP)
VOCABULARY = 512
K = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Steps of a named list of lengths. capacity, tokens: of a micro-batch, of a replica in a step."""

    lengths: str
    replicas: int
    stages: int
    capacity: int
    tokens: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.lengths}, {self.replicas} x {self.stages} stages"

    @property
    def processes(self) -> int:
        return self.replicas * self.stages

    def draw(self) -> list[Int64Array]:
        longest = largest_document(self.replicas, self.capacity)
        return [STEPS[self.lengths](self.tokens * self.replicas, longest, SEED + step) for step in range(self.steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What processes are asked: fit a cost model, plan each step's documents [D] of `data`, in order, by it in every
    candidate's way, and run them `repeats` times, with a model of these settings."""

    data: str
    model: dict[str, int]
    capacity: int
    stages: int
    steps: tuple[tuple[int, ...], ...]
    candidates: tuple[str, ...]
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One candidate. wall, replayed, work: seconds of each repeat, all steps; work is of all processes together.
    predicted: seconds of all steps; predicted_work: of all processes. micro_batches: of all replicas and steps. error:
    largest relative difference of a process's gradient from that of the first candidate."""

    wall: list[float]
    replayed: list[float]
    work: list[float]
    predicted: float
    predicted_work: float
    micro_batches: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """By candidate."""

    found: dict[str, Found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """width, layers: of the model."""

    width: int
    layers: int
    cases: tuple[Case, ...]
    repeats: int

    @property
    def model(self) -> dict[str, int]:
        heads = {"heads": self.width // 32, "kv_heads": self.width // 32}  # which peers can divide
        return {"vocab_size": VOCABULARY, "width": self.width, "layers": self.layers, **heads}


def cases(mesh: tuple[int, int], lengths: tuple[str, ...], *, capacity: int, packs: int) -> tuple[Case, ...]:
    """mesh: replicas, stages. packs: micro-batches of a replica in a step, were they full."""
    (replicas, stages), shared = mesh, {"capacity": capacity, "tokens": packs * capacity, "steps": 1}
    return tuple(Case(lengths=name, replicas=replicas, stages=stages, **shared) for name in lengths)


# Narrow, so that attention over a few thousand tokens is most of the work, as it is over many more in a wide one.
QUICK = Size(width=64, layers=4, cases=cases((1, 2), ("python_env",), capacity=2 * K, packs=4), repeats=1)
FULL = Size(
    width=64,
    layers=4,
    cases=(
        *cases((1, 2), ("python_env", "wlbllm", "prolong"), capacity=4 * K, packs=8),
        *cases((2, 2), ("python_env", "wlbllm", "prolong"), capacity=4 * K, packs=8),
        *cases((1, 4), ("python_env",), capacity=4 * K, packs=8),
    ),
    repeats=2,
)
GRIDS = {  # processes, and how they share a replica
    "1 replica x 2 stages": (2, ParallelConfig(stages=2)),
    "2 replicas x 2 stages": (4, ParallelConfig(stages=2)),
    "2 replicas x 2 peers": (4, ParallelConfig(tensor=2)),
    "2 replicas x 2 peers x 2 stages": (8, ParallelConfig(tensor=2, stages=2)),
    "2 replicas x 2 peers x 2 stages in 2 parts": (8, ParallelConfig(tensor=2, stages=2, parts=2)),
}


def plan_of(candidate: str, lengths: Int64Array, mesh: Mesh, cost: CostModel) -> StepPlan:
    """The candidate's plan of one step on pipelines; every process computes the same."""
    if candidate == OURS:
        return plan_step(lengths, mesh, cost)
    if candidate == LEVELS:
        return _timed(lengths, assignment_of(plan_step(lengths, replace(mesh, stages=1), cost)), mesh, cost)
    balance = "dp" if candidate == DP else "pp"
    tried = (
        _timed(lengths, balanced_hdp(lengths, mesh, cost, options), mesh, cost)
        for options in grid()
        if options.balance == balance
    )
    return min(tried, key=lambda plan: plan.makespan)


def assignment_of(plan: StepPlan) -> Assignment:
    return Assignment(np.diff(plan.ring_offsets), plan.document, plan.ring_index, plan.rank, plan.wave)


def _timed(lengths: Int64Array, assignment: Assignment, mesh: Mesh, cost: CostModel) -> StepPlan:
    learned = int(np.maximum(lengths - 1, 0).sum())
    return make_plan(lengths, assignment, mesh, cost, supervised_tokens=learned)


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Measure every case."""
    chosen_peers(PEERS, against)
    size, results = QUICK if quick else FULL, Results()
    for case in size.cases:
        results += compare(case, ask(case, size))
    for name in tuple(GRIDS)[: 1 if quick else None]:
        results += volume_rows(name, ask_volumes(name, size))
    return results


def ask(case: Case, size: Size) -> Answer:
    """Have processes run the case."""
    steps = case.draw()
    with scratch_folder(16 * sum(int(lengths.sum()) for lengths in steps)) as scratch:
        random_shards(scratch / "set", np.concatenate(steps), vocab_size=VOCABULARY)
        job = Job(
            data=str(scratch / "set"),
            model=size.model,
            capacity=case.capacity,
            stages=case.stages,
            steps=tuple(tuple(lengths.tolist()) for lengths in steps),
            candidates=CANDIDATES,
            repeats=size.repeats,
        )
        return TypeAdapter(Answer).validate_json(ask_ranks(MODULE, asdict(job), case.processes))


def ask_volumes(name: str, size: Size) -> volumes.Volumes:
    """Have processes count a step of Python files on a grid."""
    processes, parallel = GRIDS[name]
    replicas = parallel.replicas(processes)
    lengths = STEPS["python_env"](4 * K * replicas, largest_document(replicas, K), SEED)
    with scratch_folder(16 * int(lengths.sum())) as scratch:
        random_shards(scratch / "set", lengths, vocab_size=VOCABULARY)
        job = volumes.Job(
            data=str(scratch / "set"),
            model=size.model,
            parallel=asdict(parallel),
            capacity=K,
            lengths=tuple(lengths.tolist()),
        )
        return TypeAdapter(volumes.Volumes).validate_json(ask_ranks(VOLUMES, asdict(job), processes))


def volume_rows(name: str, found: volumes.Volumes) -> Results:
    return Results(
        rows=tuple(
            row(f"{name}, sent", dimension, Spread.of([float(sent)]), "bytes/step", formula=found.formula[dimension])
            for dimension, sent in found.counted.items()
        )
    )


def compare(case: Case, answer: Answer) -> Results:
    """Bubbles and times, and how ours stand to the others'."""
    note = "processes share cores" if case.processes > len(os.sched_getaffinity(0)) else ""
    rows = dict[str, dict[str, Row]]()
    for name, found in answer.found.items():
        for kind, spans, work in (
            (WALL, found.wall, found.work),
            (REPLAYED, found.replayed, found.work),
            (PREDICTED, [found.predicted], [found.predicted_work]),
        ):
            bubble = median(1 - busy / (case.processes * span) for busy, span in zip(work, spans, strict=True))
            counts = {"bubble": round(bubble, 4), "micro_batches": found.micro_batches, "error": found.error}
            each = row(f"{case.name}, {kind}", name, Spread.of(spans).scaled(1 / case.steps), "s/step", **counts)
            rows.setdefault(kind, {})[name] = replace(each, note=note * (kind == WALL))
    ratios = [
        ratio(f"{kind}_{other.lower().replace('-', '_')}_vs_{OURS}", each[other], each[OURS])
        for kind, each in rows.items()
        for other in answer.found
        if other != OURS
    ]
    return Results(rows=tuple(row for each in rows.values() for row in each.values()), ratios=tuple(ratios))
