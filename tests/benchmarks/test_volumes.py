"""What every dimension of the grid sends in a step is counted exactly, and is what the formula says."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from seqmesh.benchmarks.shards import random_shards
from seqmesh.benchmarks.volumes import Job, Volumes, formula, leaving
from seqmesh.benchmarks.volumes_rank import measure
from seqmesh.packer.cost import CostModel
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.plan import Mesh
from seqmesh.trainer.grid import ParallelConfig
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.parallel import Ranks
from tests.ranks import run_ranks

MODEL = {"vocab_size": 50, "width": 16, "layers": 4, "heads": 4, "kv_heads": 2}
LENGTHS = (53, 31, 23, 5, 37, 1, 2)
PROCESSES = 8
GRIDS = (ParallelConfig(tensor=2, stages=2, parts=2, chunks=2), ParallelConfig(stages=4), ParallelConfig(tensor=2))


def count_all(ranks: Ranks, jobs: list[Job]) -> list[Volumes]:
    torch.set_num_threads(1)
    return [measure(job, ranks) for job in jobs]


def test_what_is_counted_is_what_the_formula_says(tmp_path: Path) -> None:
    random_shards(tmp_path / "set", np.array(LENGTHS), vocab_size=MODEL["vocab_size"])
    jobs = [
        Job(data=str(tmp_path / "set"), model=MODEL, parallel=asdict(parallel), capacity=28, lengths=LENGTHS)
        for parallel in GRIDS
    ]
    for parallel, *found in zip(GRIDS, *run_ranks(count_all, PROCESSES, jobs), strict=True):
        assert found == found[:1] * PROCESSES
        counted = found[0].counted
        assert counted == found[0].formula
        axes = {"tensor": parallel.tensor, "pipeline": parallel.stages, "data": parallel.replicas(PROCESSES)}
        assert all((counted[name] > 0) == (axis > 1) for name, axis in axes.items())
        assert found[0].rings > 0 < counted["ring"]


def test_what_has_no_formula_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast_ sends who knows"):
        leaving("broadcast_", ([torch.zeros(2)], None), 2)
    config = ModelConfig(vocab_size=50, width=16, layers=4, heads=4, kv_heads=2, block="serial")
    plan = plan_step([2], Mesh(ranks=1, capacity=2), CostModel())
    with pytest.raises(ValueError, match="must be of parallel blocks"):
        formula(plan, config, ParallelConfig(), 4)
