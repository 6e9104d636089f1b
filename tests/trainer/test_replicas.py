"""How a model lies on ranks: where shards are cut, what is saved and loaded, what is sent when."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from seqmesh.loader.batch import PackedBatch
from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings
from seqmesh.trainer.grid import alone, one_each
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved
from seqmesh.trainer.passes import Passes
from seqmesh.trainer.replicas import Replica, Sharding, make_replica
from seqmesh.trainer.replicas.flat import ALIGN, cuts, lay_out
from seqmesh.trainer.step import EXTRA, Accumulator, StepResult, finish_step
from tests.ranks import run_ranks
from tests.support import make_set, settings_for
from tests.trainer.held import holding_whole
from tests.trainer.steps import CONFIG, batches_of_step, new_model, whole

CPU = torch.device("cpu")
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
ALONE = alone(torch.device("cpu"))
OPTIM = OptimConfig(name="lamb", lr=0.05)


class Shaped(nn.Module):
    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(tuple(shape)) for shape in shapes)


@given(
    shapes=st.lists(st.lists(st.integers(1, 70), max_size=3), min_size=1, max_size=8),
    ranks=st.integers(1, 9),
)
def test_shards_are_whole_rows_of_all_parameters_matrices_first(shapes: list[list[int]], ranks: int) -> None:
    slots = lay_out(holding_whole(Shaped(shapes)).updated)
    bounds = cuts(slots, ranks)
    assert [slot.held.number for slot in slots] == sorted(
        range(len(shapes)), key=lambda number: len(shapes[number]) <= 1
    )
    assert all(slot.start % ALIGN == 0 and slot.end - slot.used < ALIGN for slot in slots)
    assert [slot.start for slot in slots[1:]] == [slot.end for slot in slots[:-1]]
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, slots[-1].end, ranks + 1)
    for slot in slots:
        held = [slot.rows(low, high) for low, high in pairwise(bounds)]
        rows = [row for start, count in held for row in range(start, start + count)]
        assert rows == list(range(slot.shape[0] if slot.shape else 1))
        inside = sum(min(max(cut, slot.start), slot.used) - slot.start for cut in bounds) // slot.row * slot.row
        assert inside == sum(min(max(cut, slot.start), slot.used) - slot.start for cut in bounds)  # no row is cut
    for rank, cut in enumerate(bounds):
        assert abs(cut - slots[-1].end * rank / ranks) <= max(slot.row / 2 for slot in slots) + ALIGN


def test_parameters_of_two_dtypes_are_refused() -> None:
    model = Shaped([[2], [3]])
    model.parts[1] = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="must be of one dtype"):
        lay_out(holding_whole(model).updated)


def test_the_state_is_divided_and_a_shard_is_at_most_two_parameters() -> None:
    elements = []
    for rank in range(3):
        grid = replace(ALONE, data=replace(ALONE.data, rank=rank, count=3))
        replica = make_replica(new_model(), grid, "free", "optimizer", extra=EXTRA)
        optimizer = replica.make_optimizer(OPTIM)
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
        saved = replica.tensors(optimizer)
        parts = {name: part for name, part in saved.items() if not part.shared}
        assert saved.keys() - parts.keys() == {"optimizer/step"}
        elements.append(sum(part.local.numel() for name, part in parts.items() if name.endswith("exp_avg_sq")))
    total = sum(p.numel() for p in new_model().parameters())
    assert sum(elements) == total
    assert max(elements) < 1.1 * total / 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), [20, 9, 33, 4, 17, 40, 5, 8] * 4, vocab=CONFIG.vocab_size)


def spread(
    ranks: Ranks, settings: LoaderSettings, sharding: Sharding
) -> tuple[Transformer, Replica, torch.optim.Optimizer]:
    model = new_model()
    replica = make_replica(model, one_each(ranks), settings.mode, sharding, extra=EXTRA)
    return model, replica, replica.make_optimizer(OPTIM)


def run_step(
    model: Transformer,
    replica: Replica,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[PackedBatch[Tensor]],
    *,
    spoil: float = 1.0,
) -> StepResult:
    """One step; losses are multiplied by `spoil` before they go backward."""
    backward = torch.autograd.backward
    replica.begin_step()
    taken = batches_of_step(batches)
    with patch("torch.autograd.backward", lambda loss, gradient=None: backward(loss * spoil, gradient)):
        Accumulator(Passes(model=model, replica=replica, grid=alone(CPU), capacity=64)).run(taken)
    replica.reduce_()
    return finish_step(replica, optimizer, OPTIM, supervised=taken[-1].supervised_tokens_in_step, step=0, steps=10)


def train_on(ranks: Ranks, settings: LoaderSettings) -> list[tuple[str, bool, float]]:
    """A step; its state into a replica of another sharding; another step there, beside one that was never put away."""
    found = []
    for sharding, other in pairwise((*SHARDINGS, SHARDINGS[0])):
        with Loader(settings, rank=ranks.rank, mode="inline") as loader:
            job, batches = spread(ranks, settings, sharding), iter(loader)
            run_step(*job, batches)
            put_away = whole(job[1].tensors(job[2]))
            state = loader.state_dict()
            run_step(*job, batches)
        expected = whole(job[1].tensors(job[2]))
        with Loader(settings, rank=ranks.rank, mode="inline") as loader:
            loader.load_state_dict(state)
            resumed = spread(ranks, settings, other)
            fill(resumed[1].tensors(resumed[2]), put_away)
            resumed[1].loaded(resumed[2])
            same = whole(resumed[1].tensors(resumed[2]))
            kept = all(torch.equal(same[name], put_away[name]) for name in put_away) and same.keys() == put_away.keys()
            run_step(*resumed, iter(loader))
        after = whole(resumed[1].tensors(resumed[2]))
        error = max(float((after[name] - expected[name]).abs().max()) for name in expected)
        found.append((f"{sharding} to {other}", kept, error))
    return found


@torch.no_grad()
def fill(saved: Saved, tensors: dict[str, Tensor]) -> None:
    """As a checkpoint is loaded: in place, every rank its own part."""
    for name, part in saved.items():
        part.local.copy_(tensors[name][part.place])


def refuse_to_learn(ranks: Ranks, settings: LoaderSettings) -> list[tuple[bool, bool, bool]]:
    """A gradient that is not finite on one rank of two alone: whether it was taken, whether weights and state moved,
    and whether the next step, a good one, was taken."""
    found = []
    for sharding, bad in zip(SHARDINGS, (math.nan, math.inf, math.nan), strict=True):
        with Loader(settings, rank=ranks.rank, mode="inline") as loader:
            job, batches = spread(ranks, settings, sharding), iter(loader)
            before = whole(job[1].tensors(job[2]))
            result = run_step(*job, batches, spoil=bad if ranks.rank == 1 else 1.0)
            after = whole(job[1].tensors(job[2]))
            moved = not all(torch.equal(before[name], after[name]) for name in before)
            found.append((result.updated, moved, run_step(*job, batches).updated))
    return found


def resume_and_refuse(ranks: Ranks, settings: LoaderSettings) -> tuple[Any, Any]:
    return train_on(ranks, settings), refuse_to_learn(ranks, settings)


def test_any_sharding_goes_on_from_any_other_and_skips_what_is_not_finite(data: Path) -> None:
    settings = settings_for(data, ranks=2, epochs=None, mode="free")
    for resumed, refused in run_ranks(resume_and_refuse, 2, settings):
        assert len(resumed) == len(SHARDINGS)
        for name, kept, error in resumed:
            assert kept, name
            assert error < 1e-14, name
        assert refused == [(False, False, True)] * len(SHARDINGS)


@contextmanager
def recorded(model: Transformer, root: int) -> Iterator[list[str]]:
    """What happens, in order: gathers as they are issued, of the model's own parameters (`root` elements of this rank)
    or of a block's; forwards of blocks; reductions."""
    events: list[str] = []
    # What FSDP calls has another name in newer versions of torch.
    suffixes = ("single", "single") if hasattr(dist, "all_gather_single") else ("into_tensor", "tensor")
    names = [f"{name}_{suffix}" for name, suffix in zip(("all_gather", "reduce_scatter"), suffixes, strict=True)]
    gather, scatter = (getattr(dist, name) for name in names)

    def gathered(*arguments: Any, **named: Any) -> Any:
        sent = [*arguments, *named.values()][1].numel()
        events.append("gather root" if sent == root else "gather block")
        return gather(*arguments, **named)

    def scattered(*arguments: Any, **named: Any) -> Any:
        events.append("reduce")
        return scatter(*arguments, **named)

    hooks = [
        block.register_forward_pre_hook(lambda *_, number=number: events.append(f"block {number}"))
        for number, block in enumerate(model.blocks)
    ]
    with (
        patch.object(dist, names[0], gathered),
        patch.object(dist, names[1], scattered),
    ):
        yield events
    for hook in hooks:
        hook.remove()


def events_of_steps(ranks: Ranks, settings: LoaderSettings) -> list[str]:
    model, replica, optimizer = spread(ranks, settings, "parameters")
    own = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
    # What each rank sends: its rows, filled up to those of the first rank.
    root = sum(-(-p.shape[0] // ranks.count) * p.shape[1:].numel() for p in own)
    with recorded(model, root) as events, Loader(settings, rank=ranks.rank, mode="inline") as loader:

        def arriving() -> Iterator[PackedBatch[Tensor]]:
            for batch in loader:
                events.append("batch" if batch.tokens else "no batch")
                yield batch

        batches = arriving()
        for _ in range(2):
            events.append("step")
            run_step(model, replica, optimizer, batches)
    return events


def test_gathers_are_issued_in_order_of_use_the_first_beside_the_wait_for_data(tmp_path: Path) -> None:
    """Two blocks; in the second step one of two ranks has nothing."""
    folder = make_set(tmp_path, [20, 20, 20], vocab=CONFIG.vocab_size)
    jobs = [
        settings_for(folder, ranks=2, tokens_per_step=40, capacity=20, shuffle=False, epochs=None, mode=mode)
        for mode in ("free", "waves")
    ]
    for free, waves in run_ranks(all_events, 2, jobs):
        first = ["step", "gather root", "gather block", "gather block", "batch", "block 0", "block 1"]
        reduced = ["block 0", "block 1", "reduce", "reduce", "reduce"]  # in a filler, behind all work
        assert free[: len(first + reduced)] == first + reduced
        rest = free[len(first + reduced) :]
        assert rest[:4] == first[:4]
        assert rest[4:] in (["batch", "block 0", "block 1", *reduced], ["no batch", *reduced])
        forward = ["step", "gather root", "gather block", "batch", "gather block", "block 0", "block 1"]
        backward = ["gather block", "gather block", "reduce", "reduce", "reduce"]
        assert [event.removeprefix("no ") for event in waves] == [*forward, *backward] * 2


def all_events(ranks: Ranks, jobs: Sequence[LoaderSettings]) -> list[list[str]]:
    return [events_of_steps(ranks, job) for job in jobs]
