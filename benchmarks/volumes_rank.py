"""A process of `seqmesh bench pipeline` that counts what it sends in one step, and what the formula says of all.

`torchrun ... -m seqmesh.benchmarks.volumes_rank JOB OUT` reads a `Job` as JSON; the first process writes `Volumes`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from seqmesh.benchmarks.asked import answer, by_rank
from seqmesh.benchmarks.hybrid_rank import batches_of
from seqmesh.benchmarks.volumes import DIMENSIONS, Job, Sent, Volumes, formula
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.stream import Draw
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.plan import Mesh
from seqmesh.trainer.grid import ParallelConfig, make_grid
from seqmesh.trainer.job import held_model
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.passes import Passes
from seqmesh.trainer.replicas import make_replica
from seqmesh.trainer.step import EXTRA, make_runner


def measure(job: Job, ranks: Ranks) -> Volumes:
    """One step, its reduction included."""
    config = TypeAdapter(ModelConfig).validate_python(job.model)
    parallel = TypeAdapter(ParallelConfig).validate_python(job.parallel)
    grid = make_grid(ranks, parallel)
    model = held_model(config, parallel, grid, seed=0)
    replica = make_replica(model, grid, "free", extra=EXTRA)
    runner = make_runner(Passes(model=model, replica=replica, grid=grid, capacity=job.capacity), parallel.parts)
    rows, lengths = np.arange(len(job.lengths)), np.array(job.lengths)
    mesh = Mesh(ranks=grid.data.count, capacity=job.capacity, stages=parallel.stages)
    plan = plan_step(lengths, mesh, config.shape.cost_model())
    drawn = Draw(rows, np.zeros_like(rows), lengths, np.zeros_like(rows))
    batches = batches_of(plan, drawn, ShardSet(Path(job.data)), grid.data.rank)
    with Sent(grid) as counted:
        replica.begin_step()
        runner.run(batches)
        replica.reduce_()
    return Volumes(
        counted={name: round(sum(by_rank(float(counted.sent[name]), ranks))) for name in DIMENSIONS},
        formula=formula(plan, config, parallel, torch.float32.itemsize),
        rings=plan.rings,
    )


if __name__ == "__main__":
    answer(Job, measure)
