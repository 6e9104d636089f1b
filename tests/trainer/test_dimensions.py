"""Steps on every kind of mesh are those of one process running document by document: replicas, tensor peers, stages and
sharded parameters together, dense and with experts, on plans with rings, different counts of micro-batches, replicas
without documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.packer.makespan import first_of_batches
from seqmesh.packer.plan import Mode
from seqmesh.trainer.grid import ParallelConfig
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.recompute import Recompute
from seqmesh.trainer.replicas import Sharding
from tests.ranks import run_ranks
from tests.support import make_set, settings_for
from tests.trainer.steps import CONFIG, Job, Reference, Taken, plans_of, reference, take_all
from tests.trainer.test_gradient import COST, RINGS, check_process

SECONDS = 300.0  # eight processes on two cores
OPTIM = {name: OptimConfig(name=name, lr=0.05, clip=0.5) for name in ("adamw", "lamb")}  # small enough to clip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What plans are made of: documents, and what the loader is told besides the mesh."""

    lengths: Sequence[int]
    settings: dict[str, Any]


def rings(capacity: int, **more: Any) -> Plans:
    settings = {"capacity": capacity, "max_document": 53, "tokens_per_step": 160, "cost": COST}
    return Plans(lengths=RINGS, settings=settings | more)


# One long document outweighs all others: its replica runs one micro-batch, the other several.
UNEVEN = {"capacity": 60, "tokens_per_step": 180, "cost": CostModel(quadratic=8)}
PLANS = {
    "rings of 2": rings(28),
    "rings of 2, padded": rings(28, pad_to=28),
    "rings of 3": rings(20),
    "rings of 4": rings(15),
    "whole": rings(53),
    "uneven": Plans(lengths=[60, *[7] * 24, 3, 1, 2], settings=UNEVEN),
    "no documents": Plans(lengths=[20, 9], settings={"capacity": 20, "tokens_per_step": 20}),
}
DENSE = replace(CONFIG, layers=4)
MODELS = {
    "dense": DENSE,
    "serial, tied": replace(DENSE, block="serial", biases="all", norm="layer", tied_embeddings=True),
    "biased, tied": replace(DENSE, biases="all", tied_embeddings=True, windows=(None, 9), vocab_size=53),
    "wide heads": replace(DENSE, kv_heads=4),
    "experts": replace(DENSE, experts=4, ffn_width=24, balance_rate=0.02),
    "experts, serial, tied": replace(
        DENSE, block="serial", experts=4, ffn_width=24, balance_rate=0.02, tied_embeddings=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    plans: str
    tensor: int = 1
    stages: int = 1
    parts: int = 1
    chunks: int = 1
    sharding: Sharding = "replicated"
    mode: Mode = "free"
    model: str = "dense"
    optim: str = "adamw"
    recompute: Recompute = "none"

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(tensor=self.tensor, stages=self.stages, parts=self.parts, chunks=self.chunks)

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    def job(self, folder: Path, processes: int) -> Job:
        plans = PLANS[self.plans]
        data = make_set(folder / f"{self.plans}-{self.model}", plans.lengths, vocab=self.config.vocab_size)
        replicas = self.parallel.replicas(processes)
        mesh = {"ranks": replicas, "stages": self.stages, "mode": self.mode, "shuffle": False, "epochs": None}
        return Job(
            settings=settings_for(data, **mesh, **plans.settings),
            sharding=self.sharding,
            parallel=self.parallel,
            model=self.config,
            optim=OPTIM[self.optim],
            recompute=self.recompute,
        )


# By the number of processes. What is not given is replicas.
CASES = {
    2: [
        Case(tensor=2, plans="uneven", model="serial, tied"),
        Case(tensor=2, plans="no documents", model="experts", optim="lamb"),
        Case(stages=2, plans="uneven", model="biased, tied", optim="lamb"),
        Case(stages=2, parts=2, plans="whole", model="experts, serial, tied"),
    ],
    4: [
        Case(tensor=2, plans="rings of 2", model="biased, tied", optim="lamb", recompute="full"),
        Case(tensor=2, plans="uneven", sharding="optimizer", chunks=3, model="serial, tied", optim="lamb"),
        Case(tensor=2, plans="rings of 2", sharding="parameters", mode="waves", model="experts"),
        Case(tensor=4, plans="whole", model="wide heads"),
        Case(tensor=2, stages=2, parts=2, plans="whole", model="experts, serial, tied", optim="lamb"),
        Case(stages=2, plans="rings of 2", sharding="parameters", recompute="full"),
        Case(stages=2, parts=2, plans="rings of 2, padded", model="serial, tied", optim="lamb"),
        Case(stages=2, parts=2, plans="uneven", sharding="parameters", model="biased, tied"),
        Case(stages=2, plans="no documents", sharding="optimizer", model="biased, tied", optim="lamb"),
        Case(stages=4, plans="whole"),
    ],
    6: [
        Case(tensor=2, plans="rings of 3", sharding="optimizer", model="experts", optim="lamb"),
        Case(stages=2, plans="rings of 3", sharding="parameters", model="biased, tied"),
    ],
    8: [
        Case(tensor=2, stages=2, plans="rings of 2", sharding="parameters", model="biased, tied", optim="lamb"),
        Case(tensor=2, stages=2, plans="rings of 2", sharding="optimizer", model="experts", recompute="selective"),
        Case(tensor=2, stages=2, parts=2, plans="uneven", sharding="parameters", model="experts, serial, tied"),
        Case(tensor=2, stages=2, plans="no documents", model="serial, tied"),
        Case(tensor=2, plans="rings of 4", sharding="parameters", mode="waves", model="experts"),
        Case(stages=2, parts=2, plans="rings of 4", sharding="optimizer", model="biased, tied"),
        Case(stages=2, plans="rings of 4", sharding="parameters", model="experts"),
    ],
}


@pytest.mark.parametrize("processes", CASES)
def test_steps_are_those_of_one_process(tmp_path: Path, processes: int) -> None:
    cases = CASES[processes]
    jobs = [case.job(tmp_path / str(number), processes) for number, case in enumerate(cases)]
    found = run_ranks(take_all, processes, jobs, seconds=SECONDS)
    for case, job, taken in zip(cases, jobs, zip(*found, strict=True), strict=True):
        expected = reference(job.settings, PLANS[case.plans].lengths, config=job.model, optim=job.optim)
        check_steps(taken, expected, job.optim)
        check_plans(case, job.settings, taken)


def check_steps(taken: Sequence[Taken], expected: Reference, optim: OptimConfig) -> None:
    """All processes have the same numbers: gradients, weights, norms and losses, and biases of the layers they have."""
    assert optim.clip is not None
    assert all(np.any(wanted) for wanted in expected.gradients)
    for process in taken:
        check_process(process, expected, optim)
        assert np.array_equal(process.balance, expected.balance)
    assert len({process.weights.tobytes() for process in taken}) == 1
    assert len({repr(process.results) for process in taken}) == 1


def check_plans(case: Case, settings: LoaderSettings, taken: Sequence[Taken]) -> None:
    """They are what their name says, and every token was counted once."""
    replicas, tensor = settings.ranks, case.tensor
    counts = [process.counts for process in taken[: replicas * tensor : tensor]]
    assert [process.counts for process in taken] == [counts[(n // tensor) % replicas] for n in range(len(taken))]
    plans = plans_of(settings)
    if case.mode == "free":
        room = [settings.capacity * len(first_of_batches(plan.rank, plan.wave)) for plan in plans]
        filled = [plan.tokens / each for plan, each in zip(plans, room, strict=True)]
        assert [result.fill for result in taken[0].results] == pytest.approx(filled, rel=1e-12)
    if case.plans.startswith("rings"):
        widest = max(int(np.diff(plan.ring_offsets).max()) for plan in plans)
        assert widest == int(case.plans.split(",")[0][-1])
    if case.plans == "uneven" and replicas > 1:
        assert len({each[0] for each in counts}) > 1
    if case.plans == "no documents" and replicas > 1:
        assert 0 in {each[0] for each in counts}
