"""Steps through a pipeline are those of one process running document by document, on plans of the planner: with rings
between replicas, different counts of micro-batches, a replica without documents, in every way the model may lie."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqmesh.loader.feed import Feed
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.packer.plan import StepPlan
from seqmesh.trainer.grid import ParallelConfig
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.replicas import Sharding
from tests.ranks import run_ranks
from tests.support import make_set, settings_for
from tests.trainer.steps import CONFIG, STEPS, Job, Reference, Taken, reference, relative_error, take_all
from tests.trainer.test_gradient import COST, RINGS

MODEL = replace(CONFIG, layers=4)
PROCESSES = 4
OPTIM = OptimConfig(lr=0.05, clip=0.5)  # small enough to clip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """lengths: of the documents. settings: what the loader is told besides the mesh. tied: embeddings."""

    parallel: ParallelConfig
    sharding: Sharding = "replicated"
    lengths: Sequence[int] = tuple(RINGS)
    settings: dict[str, Any]
    tied: bool = False

    @property
    def replicas(self) -> int:
        return self.parallel.replicas(PROCESSES)

    def job(self, folder: Path) -> Job:
        data = make_set(folder, self.lengths, vocab=MODEL.vocab_size)
        mesh = {"ranks": self.replicas, "stages": self.parallel.stages, "shuffle": False, "epochs": None}
        return Job(
            settings=settings_for(data, **mesh, **self.settings),
            sharding=self.sharding,
            parallel=self.parallel,
            model=replace(MODEL, tied_embeddings=self.tied),
            optim=OPTIM,
        )


TWO, PARTS, FOUR = (ParallelConfig(stages=stages, parts=parts) for stages, parts in ((2, 1), (2, 2), (4, 1)))
RING = {"capacity": 28, "max_document": 53, "tokens_per_step": 160, "cost": COST}
# One long document outweighs all others: its replica runs one micro-batch, the other several.
UNEVEN = {"capacity": 60, "tokens_per_step": 180, "cost": CostModel(quadratic=8)}
FEW = {"capacity": 20, "tokens_per_step": 20}
CASES = {
    "rings": Case(parallel=TWO, sharding="parameters", settings=RING),
    "rings, padded": Case(parallel=PARTS, settings=RING | {"pad_to": 28}, tied=True),
    "uneven": Case(parallel=PARTS, sharding="parameters", lengths=[60, *[7] * 24, 3, 1, 2], settings=UNEVEN),
    "no documents": Case(parallel=TWO, sharding="optimizer", lengths=[20, 9], settings=FEW),
    "four stages": Case(parallel=FOUR, settings=RING | {"capacity": 53}),
}


def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    jobs = {name: case.job(tmp_path / name) for name, case in CASES.items()}
    found = run_ranks(take_all, PROCESSES, list(jobs.values()))
    for number, (name, case) in enumerate(CASES.items()):
        taken, job = [process[number] for process in found], jobs[name]
        check_steps(taken, reference(job.settings, case.lengths, config=job.model, optim=OPTIM))
        check_case(name, case, job.settings, taken)


def check_steps(taken: Sequence[Taken], expected: Reference) -> None:
    """All processes have the same numbers: gradients, weights, norms and losses."""
    for process in taken:
        assert relative_error(process.weights, expected.weights) <= 1e-9
        assert process.groups == 0
        for result, found, wanted in zip(process.results, process.gradients, expected.gradients, strict=True):
            assert relative_error(found, wanted) <= 1e-9
            assert result.grad_norm == pytest.approx(float(np.linalg.norm(wanted)), rel=1e-12)
            assert OPTIM.clip is not None
            assert result.grad_norm > OPTIM.clip
    assert len({process.weights.tobytes() for process in taken}) == 1
    assert len({tuple(process.results) for process in taken}) == 1


def check_case(name: str, case: Case, settings: LoaderSettings, taken: Sequence[Taken]) -> None:
    """It is what its name says, and every token was counted once."""
    counts = [process.counts for process in taken[: case.replicas]]
    assert [process.counts for process in taken] == counts * case.parallel.stages
    plans = plans_of(settings)
    assert [result.fill for result in taken[0].results] == pytest.approx(
        [plan.tokens / (settings.capacity * filled(plan)) for plan in plans], rel=1e-12
    )
    if name.startswith("rings"):
        assert sum(plan.rings for plan in plans) >= 2
    if name == "uneven":
        assert len({each[0] for each in counts}) > 1
    if name == "no documents":
        assert sorted(each[0] for each in counts) == [0, 1]


def plans_of(settings: LoaderSettings) -> list[StepPlan]:
    feed, plans = Feed(settings), list[StepPlan]()
    state = feed.start
    for _ in range(STEPS):
        step = feed.step(state)
        assert step is not None
        state = step.after
        plans.append(step.plan)
    return plans


def filled(plan: StepPlan) -> int:
    """Micro-batches that hold anything."""
    return len(set(zip(plan.rank.tolist(), plan.wave.tolist(), strict=True)))
