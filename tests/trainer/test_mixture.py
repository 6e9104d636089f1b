"""Mixtures of experts take the steps of one process, whatever the plan and the mesh, and the biases of their choices
move alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from seqmesh.packer.plan import Mode
from seqmesh.trainer.grid import ParallelConfig
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.replicas import Sharding
from tests.trainer.steps import CONFIG, Job, Reference, Taken, reference, relative_error
from tests.trainer.test_gradient import cases_for, run_jobs, settings_of

MIXTURE = replace(CONFIG, experts=6, ffn_width=24, balance_rate=0.02)
OPTIM = OptimConfig(name="lamb", lr=0.05, clip=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """case: of `cases_for` as many replicas as the mesh has."""

    case: str
    mode: Mode = "free"
    sharding: Sharding = "replicated"
    parallel: ParallelConfig = ParallelConfig()  # noqa: RUF009 -- frozen


PEERS, BOTH = ParallelConfig(tensor=2, chunks=2), ParallelConfig(tensor=2, stages=2, parts=2)
# By the number of processes. In "unsupervised" the second step has nothing to learn: biases stay, too.
STEPS = {
    1: [Steps(case="unsupervised")],
    4: [
        Steps(case="rings_15", mode="waves", sharding="parameters"),
        Steps(case="padded", mode="waves", sharding="optimizer", parallel=PEERS),
    ],
    8: [Steps(case="rings_28", sharding="parameters", parallel=BOTH)],
}


@pytest.mark.parametrize("count", STEPS)
def test_steps_are_those_of_one_process(tmp_path: Path, count: int) -> None:
    jobs, expected = [job_of(steps, tmp_path, count) for steps in STEPS[count]], dict[str, Reference]()
    for steps, job, taken in zip(STEPS[count], jobs, run_jobs(count, jobs), strict=True):
        if steps.case not in expected:
            case = cases_for(job.settings.ranks)[steps.case]
            expected[steps.case] = reference(job.settings, case.lengths, case.spans, optim=OPTIM, config=job.model)
        check(taken, expected[steps.case])


def job_of(steps: Steps, folder: Path, count: int) -> Job:
    replicas = steps.parallel.replicas(count)
    settings = settings_of(cases_for(replicas)[steps.case], folder / steps.case, replicas, steps.mode)
    return Job(
        settings=replace(settings, stages=steps.parallel.stages),
        sharding=steps.sharding,
        parallel=steps.parallel,
        model=replace(MIXTURE, layers=max(MIXTURE.layers, steps.parallel.stages * steps.parallel.parts)),
        optim=OPTIM,
    )


def check(taken: Sequence[Taken], expected: Reference) -> None:
    assert expected.balance.any()
    for process in taken:
        assert [result.updated for result in process.results] == [each.any() for each in expected.gradients]
        for found, wanted in zip(process.gradients, expected.gradients, strict=True):
            assert relative_error(found, wanted) <= 1e-9 if wanted.any() else not found.any()
        assert relative_error(process.weights, expected.weights) <= 1e-9
        assert np.array_equal(process.balance, expected.balance)
        assert process.groups == 0
    assert len({process.weights.tobytes() for process in taken}) == 1
