"""A step of a pipeline on real processes: exact gradients, and nothing of a micro-batch is held after its backward."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch forgets to export it

from seqmesh.trainer.grid import Grid, ParallelConfig, make_grid
from seqmesh.trainer.offload import Pass
from seqmesh.trainer.parallel import Ranks, open_store
from seqmesh.trainer.passes import Flight
from seqmesh.trainer.pipeline.order import Operation, Place, operations
from seqmesh.trainer.pipeline.run import Pipeline
from tests.ranks import SECONDS, run_ranks

Thing = TypeVar("Thing")
Matrix = npt.NDArray[np.float64]

WIDTH = 3
# Of two replicas: tokens of their micro-batches; some are empty, all have lengths of their own.
COUNTS = ([4, 2, 0, 7, 1, 3, 5, 2, 9], [3, 0, 6])


class Case(NamedTuple):
    stages: int
    parts: int
    counts: Sequence[Sequence[int]]


CASES = [Case(2, 1, COUNTS), Case(2, 2, COUNTS), Case(4, 1, COUNTS[:1]), Case(4, 2, COUNTS[1:]), Case(2, 1, ([], [5]))]


def layer(virtual: int) -> Tensor:
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(virtual))
    return weight.requires_grad_()


def rows_of(tokens: int) -> Tensor:
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + tokens))


class Held(Flight):
    """Is known when it is alive."""


@dataclass
class Layers:
    """One matrix a part; the loss is the sum of what comes out. most: flights that were alive at a time."""

    grid: Grid
    place: Place
    weights: list[Tensor] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    alive: list["weakref.ref[Any]"] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self.weights = [layer(self.place.virtual(part)) for part in range(self.place.parts)]

    def begin(self, batch: Any) -> None:
        self.begun.append(batch.tokens)

    def room(self, batch: Any) -> Tensor:
        return self.known(torch.empty(batch.tokens, WIDTH, dtype=torch.float64))

    def forward(self, batch: Any, part: int, x: Tensor | None, *, at_once: bool) -> Flight:
        assert (x is None) == self.place.begins(part)
        assert at_once == self.place.ends(part)
        given = rows_of(batch.tokens) if x is None else x.requires_grad_()
        out = self.known(torch.tanh(given @ self.weights[part]))
        flight = self.known(Held(out.sum() if self.place.ends(part) else out, x, Pass()))
        self.most = max(self.most, sum(isinstance(each(), Held) for each in self.alive))
        return flight

    def known(self, thing: Thing) -> Thing:
        self.alive.append(weakref.ref(thing))
        return thing


def run_cases(ranks: Ranks, cases: Sequence[Case]) -> list[list[Matrix]]:
    send_ahead(ranks)
    gc.disable()  # a cycle would hide what is held
    return [run_case(ranks, case) for case in cases]


def run_case(ranks: Ranks, case: Case) -> list[Matrix]:
    """Gradients of this process's matrices, by virtual stage, summed over replicas."""
    grid = make_grid(ranks, ParallelConfig(stages=case.stages, parts=case.parts))
    place = Place(stage=grid.stages.rank, stages=case.stages, parts=case.parts)
    layers: Any = Layers(grid, place)
    pipeline = Pipeline(layers, case.parts)
    counts = case.counts[grid.data.rank]
    for _ in range(2):
        batches: list[Any] = [SimpleNamespace(tokens=tokens) for tokens in counts]
        pipeline.run(iter(batches))
        assert not any(thing() is not None for thing in layers.alive)
    assert layers.begun == [tokens for tokens in counts if tokens] * 2
    steps = [-1 if operation.backward else 1 for operation in operations([*map(bool, counts)], place)]
    assert layers.most == max(accumulate(steps), default=0) <= place.ahead + 1
    return [of_all_replicas(weight, grid) for weight in layers.weights]


class Announced(Pipeline):
    """Says what it has done; may be told to begin with something only when the other stage has done something."""

    def __init__(self, layers: Any, store: Store, waits: dict[str, str]) -> None:
        super().__init__(layers)
        self.store, self.waits, self.own = store, waits, f"{layers.grid.data.rank} {layers.grid.stages.rank}"
        self.other = f"{layers.grid.data.rank} {1 - layers.grid.stages.rank}"

    def do(self, operation: Operation, batch: Any) -> None:
        name = f"{'B' if operation.backward else 'F'}{operation.batch}"
        if name in self.waits:
            self.store.wait([f"{self.other} {self.waits[name]}"])
        super().do(operation, batch)
        self.store.set(f"{self.own} {name}", "done")


def send_ahead(ranks: Ranks) -> None:
    """Both forwards of the warm-up are sent before the first is computed with, though the second is not yet received;
    and both gradients before the first is."""
    grid = make_grid(ranks, ParallelConfig(stages=2))
    layers: Any = Layers(grid, Place(stage=grid.stages.rank, stages=2))
    pipeline = Announced(layers, open_store(ranks, "ahead", SECONDS), ({"B0": "B1"}, {"F0": "F1"})[grid.stages.rank])
    batches: list[Any] = [SimpleNamespace(tokens=20_000 + number) for number in range(4)]  # more than sockets hold
    pipeline.run(batches)


def of_all_replicas(weight: Tensor, grid: Grid) -> Matrix:
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    grid.data.sum_(gradient)
    return gradient.numpy()


def reference(case: Case) -> list[Matrix]:
    weights = [layer(virtual) for virtual in range(case.stages * case.parts)]
    for tokens in (tokens for counts in case.counts for tokens in counts):
        x = rows_of(tokens)
        for weight in weights:
            x = torch.tanh(x @ weight)
        torch.autograd.backward(2 * x.sum())
    return [weight.grad.numpy() for weight in weights if weight.grad is not None]


def test_gradients_of_uneven_micro_batches_are_exact_and_no_more_is_held_than_is_in_flight() -> None:
    found = run_ranks(run_cases, 4, CASES)
    for number, case in enumerate(CASES):
        expected = reference(case)
        replicas = 4 // case.stages
        for process, gradients in enumerate(each[number] for each in found):
            for part, gradient in enumerate(gradients):
                wanted = expected[part * case.stages + process // replicas]
                np.testing.assert_allclose(gradient, wanted, rtol=1e-12, atol=1e-12)
