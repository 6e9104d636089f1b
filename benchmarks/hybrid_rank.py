"""A rank of `seqmesh bench hybrid`: runs whole training steps by the plans of every candidate, times and compares them.

`torchrun ... -m seqmesh.benchmarks.hybrid_rank JOB OUT` reads a `Job` as JSON; the first rank writes an `Answer`. All
ranks begin each step together. Nothing is updated, so that all candidates see the same weights in every repeat.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqmesh.benchmarks.asked import answer, by_rank
from seqmesh.benchmarks.harness import interleave
from seqmesh.benchmarks.hybrid import PACKED, WAVES, Answer, Job, documents_of, plan_of
from seqmesh.loader.batch import fill, outline
from seqmesh.loader.planner import make_step
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.stream import Draw, start_state
from seqmesh.loader.tensors import TensorMaker
from seqmesh.packer.plan import Mode, StepPlan
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.passes import Batch, Passes
from seqmesh.trainer.replicas import Replica, make_replica
from seqmesh.trainer.step import EXTRA, Accumulator

SEED = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """A model and the replica that reduces its gradient."""

    model: Transformer
    replica: Replica

    @classmethod
    def of(cls, config: ModelConfig, mode: Mode, ranks: Ranks) -> Engine:
        model = Transformer(config, seed=SEED)
        return cls(model, make_replica(model, one_each(ranks), mode, extra=EXTRA))

    def gradient(self) -> Tensor:
        """The whole gradient of the step, flat."""
        own = [parameter.grad for parameter in self.model.parameters()]
        whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in own if grad is not None]
        return torch.cat([grad.flatten() for grad in whole])


@dataclass(frozen=True, slots=True)
class Turn:
    """All steps by one candidate's plans, their batches ready."""

    engine: Engine
    runner: Accumulator
    steps: list[list[Batch]]
    ranks: Ranks

    def run(self) -> tuple[list[float], list[float]]:
        """Of each step: seconds from a common begin to this rank's end, CPU seconds of this rank's thread."""
        seconds, busy = [], []
        for batches in self.steps:
            self.ranks.wait_for_all()
            begin, cpu = time.perf_counter(), time.thread_time()
            self.runner.run(batches)
            busy.append(time.thread_time() - cpu)  # before the reduction, whose waits are busy ones
            self.engine.replica.reduce_()
            seconds.append(time.perf_counter() - begin)
            self.engine.replica.zero_()
        return seconds, busy

    def gradients(self) -> list[Tensor]:
        """Of each step."""
        found = []
        for batches in self.steps:
            self.runner.run(batches)
            self.engine.replica.reduce_()
            found.append(self.engine.gradient().clone())
            self.engine.replica.zero_()
        return found


def measure(job: Job, ranks: Ranks) -> Answer:
    """Everything that the job asks for, round by round; the first round is not counted."""
    config = TypeAdapter(ModelConfig).validate_python(job.model)
    engines: dict[Mode, Engine] = {mode: Engine.of(config, mode, ranks) for mode in ("free", "waves")}
    shards = ShardSet(Path(job.data))
    turns = {name: turn_of(name, job, shards, config, engines, ranks) for name in job.candidates}
    gradients = {name: turn.gradients() for name, turn in turns.items()}
    error = {name: largest_error(found, gradients[PACKED]) for name, found in gradients.items()}
    sent = {name: turn.runner.passes.traffic.sent for name, turn in turns.items()}
    taken = interleave({name: turn.run for name, turn in turns.items()}, job.repeats)
    walls = {name: _slowest([seconds for seconds, _ in found]) for name, found in taken.items()}
    own = {name: torch.tensor([busy for _, busy in found]) for name, found in taken.items()}
    busiest = {name: _slowest([busy for _, busy in found]) for name, found in taken.items()}
    return Answer(
        seconds={name: found.sum(1).tolist() for name, found in walls.items()},
        busiest={name: found.sum(1).tolist() for name, found in busiest.items()},
        busy={name: by_rank(float(found.sum(1).min()), ranks) for name, found in own.items()},
        sent={name: int(sum(by_rank(count, ranks))) for name, count in sent.items()},
        error=error,
    )


def turn_of(
    name: str, job: Job, shards: ShardSet, config: ModelConfig, engines: dict[Mode, Engine], ranks: Ranks
) -> Turn:
    """The candidate's batches on this rank."""
    cost, capacity = config.shape.cost_model(), job.longest if name == PACKED else job.capacity
    steps = []
    for numbers, rows in zip(job.steps, documents_of(job.steps), strict=True):
        lengths, zeros = np.array(numbers), np.zeros_like(rows)
        plan = plan_of(name, lengths, job.capacity, job.longest, ranks.count, cost)
        steps.append(batches_of(plan, Draw(rows, zeros, lengths, zeros), shards, ranks.rank))
    engine = engines["waves" if name == WAVES else "free"]
    grid = one_each(ranks)
    passes = Passes(model=engine.model, replica=engine.replica, grid=grid, capacity=capacity)
    return Turn(engine, Accumulator(passes), steps, ranks)


def batches_of(plan: StepPlan, drawn: Draw, shards: ShardSet, rank: int) -> list[Batch]:
    """What the loader would send for the plan of these documents."""
    state = start_state(SEED, 1)
    step = make_step(state, state, drawn, plan)
    settings = LoaderSettings(data="", tokens_per_step=plan.tokens, capacity=plan.tokens)
    tensor = TensorMaker(torch.device("cpu"), views=False).tensor
    waves = range(max(int(plan.waves[rank]), 1))
    return [fill(shards, outline(step, rank, wave, settings)).map(tensor) for wave in waves]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def _slowest(own: list[list[float]]) -> Tensor:
    """The most of any rank, each by itself."""
    values = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


if __name__ == "__main__":
    answer(Job, measure)
