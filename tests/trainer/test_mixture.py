"""Mixtures of experts take the steps of one process, whatever the plan, and move the biases of their choices alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqmesh.trainer.optim import OptimConfig
from tests.trainer.steps import CONFIG, Job, reference
from tests.trainer.test_gradient import MODES, SHARDINGS, cases_for, check_steps, run_jobs, settings_of

MIXTURE = replace(CONFIG, experts=4, ffn_width=24, balance_rate=0.05)
OPTIMIZERS = [OptimConfig(name=name, lr=0.05, clip=0.5) for name in ("adamw", "lamb")]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_mode_and_sharding_takes_the_steps_of_one_process(tmp_path: Path, count: int) -> None:
    cases, jobs = cases_for(count), []
    names = [name for name in cases if name.startswith(("uneven", "rings", "unsupervised"))]
    for c, name in enumerate(names):
        for m, mode in enumerate(MODES):
            for s, sharding in enumerate(SHARDINGS if count > 1 else SHARDINGS[:1]):
                settings = settings_of(cases[name], tmp_path / name, count, mode)
                optim = OPTIMIZERS[(c + m + s) % 2]
                jobs.append((name, Job(settings=settings, sharding=sharding, optim=optim, config=MIXTURE)))
    for (name, job), taken in zip(jobs, run_jobs(count, [job for _, job in jobs]), strict=True):
        case = cases[name]
        expected = reference(job.settings, case.lengths, case.spans, optim=job.optim, config=MIXTURE)
        check_steps(taken, expected, job.optim)
        for rank in taken:
            assert np.array_equal(rank.balance, expected.balance)
        assert expected.balance.any()
