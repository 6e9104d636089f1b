"""A rank of `seqmesh bench lamb`: takes optimizer steps on its part of a model's parameters.

`torchrun ... -m seqmesh.benchmarks.optimizers_rank JOB OUT` reads a `Job` as JSON; the first rank writes an `Answer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from seqmesh.benchmarks.asked import answer
from seqmesh.benchmarks.calibrate_rank import timed
from seqmesh.benchmarks.harness import interleave
from seqmesh.benchmarks.optimizers import FUSED, LAMB, PLAIN, STRETCHES, TIMM_LAMB, Answer, Job
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.optim import OptimConfig, make_optimizer_over
from seqmesh.trainer.optim.trained import each_by_itself
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.replicas import make_replica
from seqmesh.trainer.step import EXTRA

CONFIG = OptimConfig(name="lamb", lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """parameters: what `step` updates; it may write over their gradients."""

    parameters: list[nn.Parameter]
    step: Step

    def timed_step(self, gradients: list[Tensor], ranks: Ranks) -> float:
        """Seconds of a step from these gradients, which are put in place before."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
        return timed(self.step, ranks)


def new_model(job: Job) -> Transformer:
    heads = job.width // 64
    config = ModelConfig(
        vocab_size=job.vocabulary, width=job.width, layers=job.layers, heads=heads, kv_heads=max(heads // 2, 1)
    )
    return Transformer(config, seed=0)


def cut_parameters(job: Job) -> list[nn.Parameter]:
    """Every parameter cut over all ranks, with a gradient; the same whole numbers on any number of ranks."""
    world = dist.group.WORLD
    assert world is not None
    mesh = DeviceMesh.from_group(world, "cpu")
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for parameter in new_model(job).parameters():
        cut = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        cut.grad = distribute_tensor(torch.randn(parameter.shape, generator=generator) * 1e-2, mesh, [Shard(0)])
        parameters.append(cut)
    return parameters


def candidates_of(job: Job, ranks: Ranks) -> dict[str, Candidate]:
    """Every candidate that is there."""
    ours, fused, plain, theirs = (cut_parameters(job) for _ in range(4))
    trained = each_by_itself(ours)
    found = {
        LAMB: Candidate(ours, make_optimizer_over(trained, len(trained), CONFIG, ranks.sum_).step),
        STRETCHES: stretches(job, ranks),
        FUSED: Candidate(fused, torch.optim.AdamW(fused, lr=CONFIG.lr, fused=True).step),
        PLAIN: Candidate(plain, torch.optim.AdamW(plain, lr=CONFIG.lr, fused=False, foreach=False).step),
    }
    if TIMM_LAMB in job.candidates and (step := timm_step(theirs)) is not None:
        found[TIMM_LAMB] = Candidate(theirs, step)
    return {name: found[name] for name in job.candidates if name in found}


def stretches(job: Job, ranks: Ranks) -> Candidate:
    replica = make_replica(new_model(job), one_each(ranks), "free", "optimizer", extra=EXTRA)
    optimizer = replica.make_optimizer(CONFIG)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad.normal_(std=1e-2)
    return Candidate(parameters, optimizer.step)


def timm_step(parameters: list[nn.Parameter]) -> Step | None:
    """timm's LAMB, set to take the steps of the paper. None where it can not be imported."""
    try:
        lamb = import_module("timm.optim").Lamb
    except (ImportError, RuntimeError):  # the latter where its torchvision is for another torch
        return None
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": CONFIG.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    options = {"lr": CONFIG.lr, "betas": CONFIG.betas, "eps": CONFIG.eps}
    step: Step = lamb(groups, max_grad_norm=None, always_adapt=True, **options).step
    return step


def measure(job: Job, ranks: Ranks) -> Answer:
    """Everything that the job asks for, round by round; the first round is not counted."""
    found = candidates_of(job, ranks)
    rounds = {name: partial(each.timed_step, gradients_of(each), ranks) for name, each in found.items()}
    seconds = {}
    for name, taken in interleave(rounds, job.repeats).items():
        slowest = torch.tensor(taken)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds[name] = slowest.tolist()
    apart = None
    if TIMM_LAMB in found:
        apart = largest_difference(found[LAMB].parameters, found[TIMM_LAMB].parameters)
    return Answer(
        seconds=seconds,
        exchanges={name: exchanges_of(each.step) for name, each in found.items()},
        elements=sum(parameter.numel() for parameter in found[FUSED].parameters),
        apart=apart,
    )


def gradients_of(candidate: Candidate) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in candidate.parameters if parameter.grad is not None]


def exchanges_of(step: Step) -> int:
    with CommDebugMode() as counted:  # type: ignore[no-untyped-call]  # torch gives it no types
        step()
    return int(counted.get_total_counts())


def largest_difference(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> float:
    wholes = ([p.full_tensor() for p in each if isinstance(p, DTensor)] for each in (ours, theirs))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*wholes, strict=True))


if __name__ == "__main__":
    answer(Job, measure)
