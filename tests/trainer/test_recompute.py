"""What layers make again in backward instead of saving it: the same gradient to the bit, with rings, under FSDP."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqmesh.kernels.operators import attend_forward
from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.packer.offload import Offload
from seqmesh.packer.plan import Mode
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.host import Host
from seqmesh.trainer.offload import Offloader
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.passes import Passes
from seqmesh.trainer.recompute import Recompute
from seqmesh.trainer.replicas import make_replica
from seqmesh.trainer.replicas.replica import Sharding
from seqmesh.trainer.step import EXTRA, Accumulator
from tests.lanes import late_host
from tests.ranks import run_ranks
from tests.support import make_set, settings_for
from tests.trainer.steps import RECORDER, batches_of_step, reference, relative_error
from tests.trainer.steps import gradient_of as whole_gradient
from tests.trainer.test_gradient import RINGS
from tests.trainer.test_offload import CONFIG, inputs, model_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """ratio: of every micro-batch; None: what the plan says, and no offload where that is nothing. sharding: None for
    what suits the mode."""

    recompute: Recompute = "none"
    ratio: float | None = 0.0
    late: bool = False
    sharding: Sharding | None = None


PLAIN = Case()
FULL = Case(recompute="full", ratio=None)
CASES: dict[Mode, tuple[Case, ...]] = {
    "free": (
        PLAIN,
        FULL,
        Case(ratio=1 / 4),
        Case(ratio=None, late=True),
        Case(recompute="selective", ratio=1.0, late=True),
        Case(sharding="parameters"),
        Case(sharding="parameters", recompute="full", ratio=None, late=True),
    ),
    "waves": (PLAIN, FULL, Case(recompute="selective"), Case(recompute="full", ratio=1 / 4, late=True)),
}
MODEL = replace(CONFIG, layers=4)


def gradient_of(ranks: Ranks, settings: LoaderSettings, case: Case) -> tuple[Any, int, int, int]:
    """This rank's gradient of the first step, the bytes it sent for rings and moved to the host, and its micro-batches
    that the plan offloads."""
    torch.set_num_threads(1)
    model = model_of(case.recompute, MODEL)
    host = late_host() if case.late else Host.of(ranks.device)
    offloader = None if case.ratio == 0 else Offloader(model.blocks, host)
    grid = one_each(ranks)
    replica = make_replica(model, grid, settings.mode, case.sharding, extra=EXTRA)
    passes = Passes(model=model, replica=replica, grid=grid, capacity=settings.capacity, offloader=offloader)
    replica.begin_step()
    with Loader(settings, rank=ranks.rank, mode="inline") as loader:
        batches = batches_of_step(iter(loader))
    planned = sum(batch.offload_ratio > 0 for batch in batches)
    given = [batch if case.ratio is None else replace(batch, offload_ratio=case.ratio) for batch in batches]
    Accumulator(passes).run(given)
    replica.reduce_()
    gradient = whole_gradient(replica, replica.make_optimizer(RECORDER))
    return gradient, passes.traffic.sent, offloader.moved.nbytes if offloader else 0, planned


def all_cases(ranks: Ranks, jobs: tuple[LoaderSettings, ...]) -> list[dict[Case, tuple[Any, int, int, int]]]:
    return [{case: gradient_of(ranks, settings, case) for case in CASES[settings.mode]} for settings in jobs]


def test_gradients_with_rings_are_the_same_to_the_bit_on_three_ranks(tmp_path: Path) -> None:
    """In mode `free` on ranks that hold the longest document with offload alone, with whole parameters on each and with
    those that FSDP gathers once; in `waves`, where FSDP gathers them again for each layer's backward, and so for what
    runs again there."""
    data = make_set(tmp_path, RINGS, vocab=MODEL.vocab_size)
    shared = {"ranks": 3, "max_document": 53, "tokens_per_step": 130, "shuffle": False}
    cost, offload = CostModel(linear=20, quadratic=2), Offload(layers=MODEL.layers, token_cost=1)
    free = settings_for(data, capacity=10, cost=cost, offload=offload, **shared)
    waves = settings_for(data, capacity=20, cost=cost, mode="waves", **shared)
    (wanted,) = reference(waves, RINGS, config=MODEL, steps=1).gradients
    for settings, *results in zip((free, waves), *run_ranks(all_cases, 3, (free, waves)), strict=True):
        for rank in results:
            _, sent, _, planned = rank[PLAIN]
            assert (planned > 0) == (settings.offload is not None)
            for case, (gradient, again, moved, _) in rank.items():
                assert np.array_equal(gradient, rank[Case(sharding=case.sharding)][0])
                assert relative_error(gradient, wanted) <= 1e-9
                assert again == sent or case.recompute == "full"
                assert (moved > 0) == (planned > 0 if case.ratio is None else case.ratio > 0)
        # Forward keys and values, backward the same again and their gradients; `full` sends the first twice.
        plain, full = (sum(rank[case][1] for rank in results) for case in (PLAIN, FULL))
        assert 3 * full == 4 * plain > 0


@pytest.mark.parametrize(("recompute", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_only_full_recompute_runs_attention_again(
    monkeypatch: pytest.MonkeyPatch, recompute: Recompute, calls: int
) -> None:
    ran: list[int] = []

    def counting(*arguments: Any) -> Any:
        ran.append(1)
        return attend_forward(*arguments)

    monkeypatch.setattr("seqmesh.kernels.attention.attend_forward", counting)
    model = model_of(recompute)
    loss, _ = model(*inputs())
    torch.autograd.backward(loss)
    assert len(ran) == calls * CONFIG.layers


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_without_gradients_nothing_differs(recompute: Recompute) -> None:
    with torch.no_grad():
        assert torch.equal(model_of(recompute)(*inputs())[0], model_of()(*inputs())[0])


def test_two_forward_passes_may_come_before_their_backward_passes() -> None:
    """Each has its own memory of what attention gave."""
    model, plain = model_of("selective"), model_of()
    for each in (model, plain):
        losses = [each(*inputs(lengths))[0] for lengths in ((9, 20), (40, 3))]
        for loss in losses:
            torch.autograd.backward(loss)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert torch.equal(found.grad, expected.grad)
