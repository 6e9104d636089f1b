"""What layers make again in backward instead of saving it: the same gradient to the bit, with rings, under FSDP."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqmesh.kernels import attention as kernel
from seqmesh.kernels.layout import Traffic
from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.packer.offload import Offload
from seqmesh.trainer.host import Host
from seqmesh.trainer.model import Transformer
from seqmesh.trainer.offload import Offloader
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.recompute import Recompute, set_recompute
from seqmesh.trainer.replica import make_replica
from seqmesh.trainer.step import EXTRA, accumulate
from tests.lanes import late_host
from tests.ranks import run_ranks
from tests.support import make_set, settings_for
from tests.trainer.test_gradient import RINGS, reference_gradients, relative_error, whole_gradient
from tests.trainer.test_offload import CONFIG, inputs, model_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """ratio: of every micro-batch; None: what the plan says, and no offload where that is nothing."""

    recompute: Recompute = "none"
    ratio: float | None = 0.0
    late: bool = False


PLAIN = Case()
CASES = (
    PLAIN,
    Case(recompute="selective"),
    Case(recompute="full"),
    Case(ratio=1 / 4),
    Case(ratio=None, late=True),
    Case(recompute="selective", ratio=1.0, late=True),
    Case(recompute="full", ratio=None),
)


def gradient_of(ranks: Ranks, settings: LoaderSettings, case: Case) -> tuple[Any, int, int, int]:
    """This rank's gradient of the first step, the bytes it sent for rings and moved to the host, and its micro-batches
    that the plan offloads."""
    torch.set_num_threads(1)
    model = Transformer(CONFIG, seed=0).double()
    set_recompute(model.blocks, case.recompute)
    host = late_host() if case.late else Host.of(ranks.device)
    offloader = None if case.ratio == 0 else Offloader(model.blocks, host)
    replica, traffic, planned = make_replica(model, ranks, settings.mode, extra=EXTRA), Traffic(), 0
    with Loader(settings, rank=ranks.rank, mode="inline") as loader:
        for batch in loader:
            planned += batch.offload_ratio > 0
            given = batch if case.ratio is None else replace(batch, offload_ratio=case.ratio)
            accumulate(model, given, replica, settings.capacity, traffic, offloader)
            if batch.last_in_step:
                break
    replica.reduce_()
    return whole_gradient(model), traffic.sent, offloader.moved.nbytes if offloader else 0, planned


def all_cases(ranks: Ranks, settings: LoaderSettings) -> dict[Case, tuple[Any, int, int, int]]:
    return {case: gradient_of(ranks, settings, case) for case in CASES}


@pytest.mark.parametrize("mode", ["free", "waves"])
def test_gradients_with_rings_are_the_same_to_the_bit_on_three_ranks(tmp_path: Path, mode: str) -> None:
    """In mode `free` on ranks that hold the longest document with offload alone; in `waves` under FSDP, which gathers
    weights again for each layer's backward, and so for what runs again there."""
    data = make_set(tmp_path, RINGS, vocab=CONFIG.vocab_size)
    offload = Offload(layers=CONFIG.layers, token_cost=1) if mode == "free" else None
    settings = settings_for(
        data,
        ranks=3,
        capacity=10 if mode == "free" else 20,
        max_document=53,
        tokens_per_step=160,
        shuffle=False,
        mode=mode,
        cost=CostModel(linear=20, quadratic=2),
        offload=offload,
    )
    results = run_ranks(all_cases, 3, settings)
    for rank in results:
        expected, sent, _, planned = rank[PLAIN]
        assert sent > 0
        assert (planned > 0) == (mode == "free")
        for case, (gradient, again, moved, _) in rank.items():
            assert np.array_equal(gradient, expected)
            # Forward keys and values, backward the same again and their gradients; `full` sends the first twice.
            assert 3 * again == sent * (4 if case.recompute == "full" else 3)
            assert (moved > 0) == (case.ratio is None and planned > 0 or bool(case.ratio))
    (wanted,) = reference_gradients(RINGS, settings, CONFIG, steps=1)
    assert relative_error(results[0][PLAIN][0], wanted) <= 1e-9


@pytest.mark.parametrize(("recompute", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_only_full_recompute_runs_attention_again(
    monkeypatch: pytest.MonkeyPatch, recompute: Recompute, calls: int
) -> None:
    ran: list[int] = []
    attend = kernel.attend_forward

    def counting(*arguments: Any) -> Any:
        ran.append(1)
        return attend(*arguments)

    monkeypatch.setattr(kernel, "attend_forward", counting)
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
