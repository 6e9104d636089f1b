"""Mixtures of experts take the steps of one process, whatever the plan, and move the biases of their choices alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqmesh.packer.plan import Mode
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.replicas import Sharding
from tests.trainer.steps import CONFIG, Job, Reference, reference
from tests.trainer.test_gradient import cases_for, check_steps, run_jobs, settings_of

MIXTURE = replace(CONFIG, experts=4, ffn_width=24, balance_rate=0.02)
OPTIM = OptimConfig(name="lamb", lr=0.05, clip=0.5)
Steps = tuple[str, Mode, Sharding]
# By the number of ranks. Uneven: several micro-batches on one rank, one on another. Then nobody has anything to learn.
JOBS: dict[int, list[Steps]] = {
    1: [("uneven", "free", "replicated")],
    2: [("padded", "waves", "replicated"), ("unsupervised", "free", "optimizer"), ("uneven", "free", "parameters")],
    3: [("rings_20", "free", "replicated"), ("rings_20", "free", "optimizer"), ("rings_20", "waves", "parameters")],
}


@pytest.mark.parametrize("count", JOBS)
def test_every_mode_and_sharding_takes_the_steps_of_one_process(tmp_path: Path, count: int) -> None:
    cases, expected = cases_for(count), dict[str, Reference]()
    jobs = [
        Job(
            settings=settings_of(cases[name], tmp_path / name, count, mode),
            sharding=sharding,
            optim=OPTIM,
            model=MIXTURE,
        )
        for name, mode, sharding in JOBS[count]
    ]
    for (name, _, _), job, taken in zip(JOBS[count], jobs, run_jobs(count, jobs), strict=True):
        if name not in expected:
            case = cases[name]
            expected[name] = reference(job.settings, case.lengths, case.spans, optim=OPTIM, config=MIXTURE)
        check_steps(taken, expected[name], OPTIM)
        assert expected[name].balance.any()
        assert all(np.array_equal(rank.balance, expected[name].balance) for rank in taken)
