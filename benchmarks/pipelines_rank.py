"""A process of `seqmesh bench pipeline`: runs whole steps by the plans of every candidate, and times each operation.

`torchrun ... -m seqmesh.benchmarks.pipelines_rank JOB OUT` reads a `Job` as JSON; the first process writes an `Answer`.
All begin each step together. Nothing is updated or reduced: all candidates see the same weights in every repeat.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from seqmesh.benchmarks.asked import answer, by_rank
from seqmesh.benchmarks.harness import interleave
from seqmesh.benchmarks.hybrid import documents_of
from seqmesh.benchmarks.hybrid_rank import batches_of
from seqmesh.benchmarks.pipelines import Answer, Found, Job, plan_of
from seqmesh.benchmarks.replay import Process, replayed
from seqmesh.kernels.layout import Layout
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.stream import Draw
from seqmesh.packer.cost import CostModel, attended_pairs
from seqmesh.packer.fit import Sample, fit_cost
from seqmesh.packer.makespan import first_of_batches
from seqmesh.packer.plan import Mesh, StepPlan
from seqmesh.trainer.grid import Grid, ParallelConfig, make_grid
from seqmesh.trainer.job import held_model
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.passes import Batch, Passes
from seqmesh.trainer.pipeline.order import Operation
from seqmesh.trainer.pipeline.run import Pipeline
from seqmesh.trainer.replicas import make_replica
from seqmesh.trainer.step import EXTRA

SEED = 0
FITTED = ((32, 32), (1, 1024), (1, 2048), (16, 64), (4, 256), (2, 1024), (8, 256), (1, 512))  # documents, their tokens
FIT_REPEATS = 3


@dataclass(slots=True)
class Span:
    """An operation. begin, end: on the machine's monotonic clock; work: CPU seconds of this thread."""

    operation: Operation
    begin: float
    end: float
    work: float


class Recorded(Pipeline):
    """Says when each operation began and ended."""

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        self.spans: list[Span] = []

    def do(self, operation: Operation, batch: Batch) -> None:
        begin, cpu = time.monotonic(), time.thread_time()
        super().do(operation, batch)
        self.spans.append(Span(operation, begin, time.monotonic(), time.thread_time() - cpu))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    plan: StepPlan
    batches: list[Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of all steps in one repeat, the same on all processes."""

    wall: float
    replayed: float
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """All steps by one candidate's plans, their batches ready."""

    runner: Recorded
    grid: Grid
    steps: list[Step]
    gradients: list[Tensor] = field(default_factory=list)

    def run(self) -> Measured:
        wall = again = work = 0.0
        self.gradients.clear()
        for step in self.steps:
            self.grid.world.wait_for_all()
            begin = time.monotonic()
            self.runner.run(step.batches)
            self.gradients.append(taken_gradient(self.runner.passes.model))
            spans = self._spans()
            wall += max((span.end for each in spans.values() for span in each), default=begin) - begin
            took = {process: [(span.operation, span.work) for span in each] for process, each in spans.items()}
            again += replayed(step.plan, took, stages=self.grid.stages.count)
            work += sum(span.work for each in spans.values() for span in each)
        return Measured(wall=wall, replayed=again, work=work)

    def _spans(self) -> dict[Process, list[Span]]:
        """Those of all processes since the last call."""
        place = self.grid.data.rank, self.grid.stages.rank
        every: list[Any] = [None] * self.grid.world.count
        dist.all_gather_object(every, (place, self.runner.spans))
        self.runner.spans = []
        return dict(every)


def taken_gradient(model: Transformer) -> Tensor:
    """What this process has of the step's gradient, flat; cleared."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    return found


def measure(job: Job, ranks: Ranks) -> Answer:
    """Everything that the job asks for, round by round; the first round is not counted."""
    config = TypeAdapter(ModelConfig).validate_python(job.model)
    parallel = ParallelConfig(stages=job.stages)
    grid = make_grid(ranks, parallel)
    model = held_model(config, parallel, grid, seed=SEED)
    replica = make_replica(model, grid, "free", extra=EXTRA)
    runner = Recorded(Passes(model=model, replica=replica, grid=grid, capacity=job.capacity))
    cost, unit = fitted(config, ranks)
    mesh = Mesh(ranks=grid.data.count, capacity=job.capacity, stages=job.stages)
    shards = ShardSet(Path(job.data))
    steps = {name: steps_of(name, job, shards, mesh, cost, grid) for name in job.candidates}
    turns = {name: Turn(runner=runner, grid=grid, steps=each) for name, each in steps.items()}
    taken = interleave({name: turn.run for name, turn in turns.items()}, job.repeats)
    first = turns[job.candidates[0]]
    return Answer(
        found={
            name: found_of([step.plan for step in turn.steps], taken[name], unit, error_of(turn, first, ranks))
            for name, turn in turns.items()
        }
    )


def found_of(plans: Sequence[StepPlan], taken: Sequence[Measured], unit: float, error: float) -> Found:
    return Found(
        wall=[each.wall for each in taken],
        replayed=[each.replayed for each in taken],
        work=[each.work for each in taken],
        predicted=sum(plan.makespan for plan in plans) * unit,
        predicted_work=sum(int(plan.costs.sum()) for plan in plans) * unit,
        micro_batches=sum(len(first_of_batches(plan.rank, plan.wave)) for plan in plans),
        error=error,
    )


def error_of(turn: Turn, first: Turn, ranks: Ranks) -> float:
    """Summed over replicas, a process's gradient of each step is that of any other plan."""
    worst = 0.0
    for found, expected in zip(turn.gradients, first.gradients, strict=True):
        both = torch.stack([found, expected])
        turn.grid.data.sum_(both)
        worst = max(worst, float((both[0] - both[1]).norm() / both[1].norm()))
    return max(by_rank(worst, ranks))


def steps_of(name: str, job: Job, shards: ShardSet, mesh: Mesh, cost: CostModel, grid: Grid) -> list[Step]:
    steps = []
    for numbers, rows in zip(job.steps, documents_of(job.steps), strict=True):
        lengths, zeros = np.array(numbers), np.zeros_like(rows)
        plan = plan_of(name, lengths, mesh, cost)
        batches = batches_of(plan, Draw(rows, zeros, lengths, zeros), shards, grid.data.rank)
        steps.append(Step(plan=plan, batches=batches))
    return steps


def fitted(config: ModelConfig, ranks: Ranks) -> tuple[CostModel, float]:
    """The first process's costs of micro-batches of the whole model, and the seconds of their unit."""
    said = ""
    if ranks.is_first:
        fit = fit_cost(timings(config))
        said = json.dumps([asdict(fit.cost), fit.unit])
    cost, unit = json.loads(ranks.texts(said)[0])
    return TypeAdapter(CostModel).validate_python(cost), unit


def timings(config: ModelConfig) -> list[Sample]:
    """The lowest CPU seconds of some micro-batches, forward and backward."""
    model = Transformer(config, seed=SEED)
    turns = {str(each): lambda each=each: spent(model, *each) for each in FITTED}
    taken = interleave(turns, FIT_REPEATS)
    return [
        Sample(
            tokens=count * tokens,
            pairs=count * int(attended_pairs(np.array([tokens]))[0]),
            seconds=min(taken[str((count, tokens))]),
        )
        for count, tokens in FITTED
    ]


def spent(model: Transformer, count: int, tokens: int) -> float:
    positions = torch.arange(tokens).repeat(count)
    ids = positions % model.config.vocab_size
    layout = Layout(torch.arange(0, count * tokens + 1, tokens, dtype=torch.int32), tokens)
    begin = time.thread_time()
    loss, _ = model(ids, positions, layout, ids)
    torch.autograd.backward(loss)
    return time.thread_time() - begin


if __name__ == "__main__":
    answer(Job, measure)
