"""The gradient of a step through a pipeline is that of one process running document by document, on plans of the
planner: with rings between replicas, different counts of micro-batches, a replica without documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.packer.plan import StepPlan
from seqmesh.trainer.grid import Grid, ParallelConfig, make_grid
from seqmesh.trainer.models.division import layers_of
from seqmesh.trainer.models.transformer import Transformer, parameter_shapes
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.passes import Passes
from seqmesh.trainer.pipeline.run import Pipeline
from seqmesh.trainer.replicas import make_replica
from seqmesh.trainer.step import EXTRA
from tests.ranks import run_ranks
from tests.support import make_set, settings_for
from tests.trainer.steps import CONFIG, Vector, batches_of_step, reference, relative_error
from tests.trainer.test_gradient import COST, RINGS

MODEL = replace(CONFIG, layers=4)
PROCESSES, STEPS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """lengths: of the documents. settings: what the loader is told besides the mesh."""

    stages: int
    parts: int = 1
    lengths: Sequence[int] = tuple(RINGS)
    settings: dict[str, Any]

    @property
    def replicas(self) -> int:
        return PROCESSES // self.stages


RING = {"capacity": 28, "max_document": 53, "tokens_per_step": 160, "cost": COST}
# One long document outweighs all others: its replica runs one micro-batch, the other several.
UNEVEN = {"capacity": 60, "tokens_per_step": 180, "cost": CostModel(quadratic=8)}
CASES = {
    "rings": Case(stages=2, settings=RING),
    "rings, padded, in parts": Case(stages=2, parts=2, settings=RING | {"pad_to": 28}),
    "uneven": Case(stages=2, parts=2, lengths=[60, *[7] * 24, 3, 1, 2], settings=UNEVEN),
    "no documents": Case(stages=2, lengths=[20, 9], settings={"capacity": 20, "tokens_per_step": 20}),
    "four stages": Case(stages=4, settings=RING | {"capacity": 53}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """gradients: of each step, by name, summed over replicas. counts: micro-batches with tokens. extra: what this
    process would add to the step's sums."""

    gradients: list[dict[str, npt.NDArray[np.float64]]]
    counts: list[int]
    extra: list[float]


def take_all(ranks: Ranks, jobs: Sequence[tuple[Case, LoaderSettings]]) -> list[Taken]:
    torch.set_num_threads(1)
    return [take_steps(ranks, case, settings) for case, settings in jobs]


def take_steps(ranks: Ranks, case: Case, settings: LoaderSettings) -> Taken:
    grid = make_grid(ranks, ParallelConfig(stages=case.stages, parts=case.parts))
    layers = layers_of(MODEL.layers, case.stages * case.parts)[grid.stages.rank :: case.stages]
    model = Transformer(MODEL, seed=0, layers=layers).double()
    replica = make_replica(model, grid, settings.mode, extra=EXTRA)
    runner = Pipeline(Passes(model=model, replica=replica, grid=grid, capacity=settings.capacity), case.parts)
    gradients, counts = [], []
    with Loader(settings, rank=grid.data.rank, mode="inline") as loader:
        batches = iter(loader)
        for _ in range(STEPS):
            taken = batches_of_step(batches)
            runner.run(taken)
            counts.append(sum(batch.tokens > 0 for batch in taken))
            gradients.append(summed(model, grid))
    return Taken(gradients=gradients, counts=counts, extra=replica.extra.tolist())


def summed(model: Transformer, grid: Grid) -> dict[str, npt.NDArray[np.float64]]:
    """Over replicas; cleared."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        whole = parameter.grad.clone()
        grid.data.sum_(whole)
        found[name] = whole.numpy()
        parameter.grad.zero_()
    return found


def by_name(vector: Vector) -> dict[str, npt.NDArray[np.float64]]:
    """What `steps.flat` put end to end."""
    shapes = dict(sorted(parameter_shapes(MODEL).items()))
    ends = np.cumsum([shape.numel() for shape in shapes.values()])
    return dict(zip(shapes, np.split(vector, ends[:-1]), strict=True))


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    settings = {
        name: settings_for(
            make_set(tmp_path / name, case.lengths, vocab=MODEL.vocab_size),
            ranks=case.replicas,
            stages=case.stages,
            shuffle=False,
            epochs=None,
            **case.settings,
        )
        for name, case in CASES.items()
    }
    found = run_ranks(take_all, PROCESSES, [(case, settings[name]) for name, case in CASES.items()])
    for number, (name, case) in enumerate(CASES.items()):
        processes = [process[number] for process in found]
        expected = reference(settings[name], case.lengths, config=MODEL, steps=STEPS, optim=OptimConfig(lr=0.0))
        check_gradients(processes, [by_name(each) for each in expected.gradients], case)
        check_case(name, case, settings[name], processes)


def check_gradients(found: Sequence[Taken], expected: Sequence[dict[str, Any]], case: Case) -> None:
    for step, wanted in enumerate(expected):
        for name, gradient in wanted.items():
            held = [process.gradients[step][name] for process in found if name in process.gradients[step]]
            assert len(held) == case.replicas  # on one stage
            assert all(np.array_equal(each, held[0]) for each in held)
            assert relative_error(held[0].ravel(), gradient) <= 1e-9


def check_case(name: str, case: Case, settings: LoaderSettings, found: Sequence[Taken]) -> None:
    """It is what its name says; only the last stage has a loss, and counts."""
    counts = [process.counts for process in found[-case.replicas :]]
    assert [process.counts for process in found] == counts * case.stages
    assert all(sum(process.extra) == 0 for process in found[: -case.replicas])
    feed, plans = Feed(settings), list[StepPlan]()
    state = feed.start
    for _ in range(STEPS):
        step = feed.step(state)
        assert step is not None
        state = step.after
        plans.append(step.plan)
    tokens = sum(process.extra[1] for process in found)
    assert tokens == sum(plan.tokens for plan in plans)
    if name.startswith("rings"):
        assert sum(plan.rings for plan in plans) >= 2
    if name == "uneven":
        assert len({each[0] for each in counts}) > 1
    if name == "no documents":
        assert sorted(each[0] for each in counts) == [0, 1]
