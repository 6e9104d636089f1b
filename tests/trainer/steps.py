"""Optimizer steps from plans on real ranks, beside the same steps of one process running document by document."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import UNSUPERVISED, cross_entropy_sum
from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.plan import StepPlan
from seqmesh.trainer.grid import Grid, ParallelConfig, make_grid
from seqmesh.trainer.job import held_model
from seqmesh.trainer.models.balance import loads_size, move_biases_, take_loads
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.optim import OptimConfig, learning_rate, make_optimizer
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved
from seqmesh.trainer.passes import Batch, Passes
from seqmesh.trainer.recompute import Recompute, set_recompute
from seqmesh.trainer.replicas import Replica, Sharding, make_replica
from seqmesh.trainer.step import EXTRA, StepResult, finish_step, make_runner
from tests.support import documents_of
from tests.trainer.slow_lamb import SlowLamb

CONFIG = ModelConfig(vocab_size=50, width=16, layers=2, heads=4, kv_heads=2, init_std=0.2)
STEPS = 2
BALANCE = ".balance"  # how names of biases of experts' choices end
# With no memory of earlier steps and no rate, its first moment is the gradient.
RECORDER = OptimConfig(lr=0.0, betas=(0.0, 0.0), weight_decay=0.0)
Vector = npt.NDArray[np.float64]
Spans = Sequence[tuple[int, int]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Steps to take."""

    settings: LoaderSettings
    sharding: Sharding | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = CONFIG
    optim: OptimConfig = field(default_factory=OptimConfig)
    recompute: Recompute = "none"
    dtype: str = "float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a rank has after its steps. gradients: whole, of each step before clipping. counts: its micro-batches with
    tokens. sent: bytes for rings. weights: whole, at the end; own: a digest of them as they lie on this rank, where it
    has them all. groups: process groups made since the replica was. balance: biases of experts' choices, at the end."""

    gradients: list[Vector]
    results: list[StepResult]
    counts: list[int]
    sent: int
    weights: Vector
    own: str
    groups: int
    balance: Vector


def new_model(dtype: str = "float64", config: ModelConfig = CONFIG) -> Transformer:
    torch.set_num_threads(1)
    return Transformer(config, seed=0).to(getattr(torch, dtype))


def take_all(ranks: Ranks, jobs: Sequence[Job]) -> list[Taken]:
    return [take_steps(ranks, job) for job in jobs]


def take_steps(ranks: Ranks, job: Job) -> Taken:
    """The first steps of a job on this rank."""
    torch.set_num_threads(1)
    grid, extra = make_grid(ranks, job.parallel), EXTRA + loads_size(job.model)
    model = held_model(job.model, job.parallel, grid, seed=0).to(getattr(torch, job.dtype))
    set_recompute(model.blocks, job.recompute)
    replica = make_replica(model, grid, job.settings.mode, job.sharding, extra=extra)
    optimizer, recorder = replica.make_optimizer(job.optim), replica.make_optimizer(RECORDER)
    passes = Passes(model=model, replica=replica, grid=grid, capacity=job.settings.capacity)
    runner = make_runner(passes, job.parallel.parts)
    gradients, results, counts = [], [], []
    groups = groups_now()
    with (
        patch("torch.distributed.new_group", side_effect=AssertionError("a process group is made in a step")),
        Loader(job.settings, rank=grid.data.rank, mode="inline") as loader,
    ):
        batches = iter(loader)
        for step in range(STEPS):
            replica.begin_step()
            taken = batches_of_step(batches)
            runner.run(taken)
            counts.append(sum(batch.tokens > 0 for batch in taken))
            replica.extra[EXTRA:] = take_loads(model)
            replica.reduce_()
            gradients.append(gradient_of(replica, recorder, grid))
            supervised = taken[-1].supervised_tokens_in_step
            results.append(finish_step(replica, optimizer, job.optim, supervised=supervised, step=step, steps=STEPS))
            if results[-1].updated:
                move_biases_(model, results[-1].loads)
    held = whole(replica.tensors(optimizer), "model/", grid=grid)
    return Taken(
        gradients=gradients,
        results=results,
        counts=counts,
        sent=passes.traffic.sent,
        weights=flat(held),
        own=digest(model),
        groups=groups_now() - groups,
        balance=flat({name: each for name, each in held.items() if name.endswith(BALANCE)}),
    )


def batches_of_step(batches: Iterator[Batch]) -> list[Batch]:
    """Those of the next step."""
    taken = [next(batches)]
    while not taken[-1].last_in_step:
        taken.append(next(batches))
    return taken


def plans_of(settings: LoaderSettings) -> list[StepPlan]:
    """Of the first steps."""
    feed, plans = Feed(settings), list[StepPlan]()
    state = feed.start
    for _ in range(STEPS):
        step = feed.step(state)
        assert step is not None
        state = step.after
        plans.append(step.plan)
    return plans


def gradient_of(replica: Replica, recorder: torch.optim.Optimizer, grid: Grid | None = None) -> Vector:
    """The whole gradient, whichever way it lies on the ranks; all of them must call it."""
    replica.update(recorder)
    return flat(whole(replica.tensors(recorder), "optimizer/", "/exp_avg", grid=grid))


def groups_now() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def digest(model: nn.Module) -> str:
    """Of all weights, where this rank has them; else nothing."""
    every = [p.detach() for p in model.parameters()]
    if any(isinstance(p, DTensor) for p in every):
        return ""
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in every)).hexdigest()


def whole(saved: Saved, prefix: str = "", suffix: str = "", *, grid: Grid | None = None) -> dict[str, Tensor]:
    """Whole tensors of the names with this beginning and end, on every rank; all ranks must call it. grid: None where
    every process is a replica."""
    chosen = {name: part for name, part in saved.items() if name.startswith(prefix) and name.endswith(suffix)}
    return _join(chosen, grid) if dist.is_initialized() else {name: part.local.clone() for name, part in chosen.items()}


def _join(parts: Saved, grid: Grid | None) -> dict[str, Tensor]:
    """All of them in one reduction, in which a second number counts who holds each element; what all replicas hold
    counts for the first."""
    first = grid.data.is_first if grid else dist.get_rank() == 0
    shapes = _union({name: (part.shape, part.local.dtype) for name, part in parts.items()})
    both = {name: torch.zeros(2, *shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    for name, part in parts.items():
        if not part.spare and (first or not part.shared):
            both[name][:, *part.place] = torch.stack([part.local, torch.ones_like(part.local)])
    end_to_end = torch.cat([each.flatten() for each in both.values()])
    dist.all_reduce(end_to_end)
    joined = torch.split(end_to_end, [each.numel() for each in both.values()])
    tensors = {name: each.view(2, *shapes[name][0]) for name, each in zip(both, joined, strict=True)}
    assert all(each[1].eq(1).all() for each in tensors.values()), "an element is on no rank or on two"
    return {name: each[0] for name, each in tensors.items()}


def _union(mine: dict[str, Any]) -> dict[str, Any]:
    """What any rank has."""
    every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return {name: value for each in every for name, value in each.items()}


def flat(tensors: dict[str, Tensor]) -> Vector:
    """All tensors end to end, in the order of their names."""
    return np.concatenate([np.empty(0), *(tensors[name].double().numpy().ravel() for name in sorted(tensors))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    gradients: list[Vector]
    weights: Vector
    balance: Vector


def reference(
    settings: LoaderSettings,
    lengths: Sequence[int],
    spans: Sequence[Spans] | None = None,
    *,
    optim: OptimConfig | None = None,
    dtype: str = "float64",
    config: ModelConfig = CONFIG,
    steps: int = STEPS,
) -> Reference:
    """One process, one document at a time, mean over the step's supervised tokens; plain optimizers."""
    documents = documents_of(lengths, vocab=config.vocab_size)
    optim = optim or OptimConfig()
    feed, model = Feed(settings), new_model(dtype, config)
    update = _plain_update(model, optim)
    gradients, state = [], feed.start
    for number in range(steps):
        step = feed.step(state)
        assert step is not None
        state = step.after
        model.zero_grad(set_to_none=False)
        taken = [(documents[d], spans[d] if spans else None) for d in step.documents.document.tolist()]
        labelled = [(torch.from_numpy(ids), labels_of(ids, where)) for ids, where in taken]
        supervised = sum(int((labels != UNSUPERVISED).sum()) for _, labels in labelled)
        for ids, labels in labelled:
            layout = Layout(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
            loss, _ = cross_entropy_sum(model(ids, torch.arange(len(ids)), layout), labels)
            torch.autograd.backward(loss / max(supervised, 1))
        gradients.append(flat({name: _gradient(p) for name, p in model.named_parameters()}))
        loads = take_loads(model)
        if supervised:
            update(learning_rate(optim, number, steps))
            move_biases_(model, loads.tolist())
    return Reference(
        gradients=gradients,
        weights=flat(model.state_dict()),
        balance=flat({name: each for name, each in model.state_dict().items() if name.endswith(BALANCE)}),
    )


def labels_of(ids: npt.NDArray[Any], spans: Spans) -> Tensor:
    after = range(1, len(ids))
    inside = [spans is None or any(begin <= place < end for begin, end in spans) for place in after]
    return torch.tensor(
        [*(int(ids[p]) if ok else UNSUPERVISED for p, ok in zip(after, inside, strict=True)), UNSUPERVISED]
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter.detach()) if parameter.grad is None else parameter.grad.clone()


def _plain_update(model: nn.Module, config: OptimConfig) -> Callable[[float], None]:
    parameters = list(model.parameters())
    slow = SlowLamb([p.detach() for p in parameters], config)
    adamw = make_optimizer(parameters, config)

    def update(rate: float) -> None:
        gradients = [_gradient(p) for p in parameters]
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        scale = 1.0 if config.clip is None else min(1.0, config.clip / norm)
        if config.name == "lamb":
            slow.step([g * scale for g in gradients], rate)
            return
        for group in adamw.param_groups:
            group |= {"lr": rate, "fused": False, "foreach": False}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * scale
        adamw.step()

    return update


def relative_error(found: Vector, expected: Vector) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
