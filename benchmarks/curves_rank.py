"""A rank of `seqmesh bench curves`: trains on the global batches of a job in another way than the trainer does.

`torchrun ... -m seqmesh.benchmarks.curves_rank JOB OUT` reads a `Job` as JSON; the first rank writes a `Curve`. The
documents of each step, the weights at the start, the optimizer and its schedule are those of the job's configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from seqmesh.benchmarks.asked import answer, by_rank
from seqmesh.benchmarks.baselines.plain import PlainModel, packed, padded, rows_of
from seqmesh.benchmarks.curves import PADDED, Curve, Job
from seqmesh.benchmarks.hybrid import STATIC, plan_of
from seqmesh.benchmarks.hybrid_rank import batches_of
from seqmesh.loader.feed import Feed
from seqmesh.loader.planner import Step
from seqmesh.trainer.config import TrainConfig, load_config
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.optim import learning_rate, make_optimizer, set_rate
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.passes import Passes
from seqmesh.trainer.replicas import make_replica
from seqmesh.trainer.step import EXTRA, Accumulator, finish_step
from seqmesh.trainer.train import loader_settings

TrainStep = Callable[[Step, int], float]  # of a step and its number: trains on it, returns its loss


def measure(job: Job, ranks: Ranks) -> Curve:
    """All steps of the job."""
    config = load_config(job.config)
    feed = Feed(loader_settings(config, ranks.count))
    train = static_step(config, feed, ranks) if job.way == STATIC else plain_step(config, feed, ranks, job.way)
    losses, seconds, tokens, state = [], [], [], feed.start
    for number in range(config.steps):
        step = feed.step(state)
        if step is None:
            break
        state = step.after
        ranks.wait_for_all()
        begin = time.perf_counter()
        losses.append(train(step, number))
        seconds.append(time.perf_counter() - begin)
        tokens.append(step.plan.tokens)
    return Curve(losses=losses, seconds=seconds, tokens=tokens)


def static_step(config: TrainConfig, feed: Feed, ranks: Ranks) -> TrainStep:
    """Our trainer under a static mesh: every document over all ranks that the longest needs."""
    model = Transformer(config.model, seed=config.seed)
    replica = make_replica(model, one_each(ranks), "free", extra=EXTRA)
    optimizer = make_optimizer(model.parameters(), config.optim)
    capacity, longest = config.loader.capacity, feed.settings.longest
    cost = config.cost_model()
    runner = Accumulator(Passes(model=model, replica=replica, grid=one_each(ranks), capacity=capacity))

    def train(step: Step, number: int) -> float:
        plan = plan_of(STATIC, step.plan.lengths, capacity, longest, ranks.count, cost)
        runner.run(batches_of(plan, step.documents, feed.shards, ranks.rank))
        replica.reduce_()
        supervised = step.plan.supervised_tokens
        done = finish_step(replica, optimizer, config.optim, supervised=supervised, step=number, steps=config.steps)
        return done.loss

    return train


def plain_step(config: TrainConfig, feed: Feed, ranks: Ranks, way: str) -> TrainStep:
    """A loop of plain PyTorch: DistributedDataParallel, documents dealt to ranks in turn, micro-batches of as many
    tokens as a rank holds."""
    plain = PlainModel(config.model)
    plain.load_state_dict(Transformer(config.model, seed=config.seed).state_dict())
    distributed = DistributedDataParallel(plain) if ranks.count > 1 else None
    model = distributed or plain
    optimizer = make_optimizer(plain.parameters(), config.optim)
    batch_of = padded if way == PADDED else packed

    def train(step: Step, number: int) -> float:
        documents = tokens_of(step, feed)[ranks.rank :: ranks.count]
        batches = rows_of(documents, config.loader.capacity, pad=way == PADDED)
        most = int(max(by_rank(len(batches), ranks)))
        batches += [[torch.zeros(1, dtype=torch.int64)]] * (most - len(batches))  # DDP wants as many on every rank
        total = torch.zeros(1)
        for position, documents in enumerate(batches):
            with distributed.no_sync() if distributed and position + 1 < most else nullcontext():
                loss = model(*batch_of(documents))
                # DDP takes the mean over ranks, of what is to be a sum.
                torch.autograd.backward(loss * ranks.count / step.plan.supervised_tokens)
            total += loss.detach()
        if config.optim.clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), config.optim.clip)
        set_rate(optimizer, learning_rate(config.optim, number, config.steps))
        optimizer.step()
        optimizer.zero_grad()
        ranks.sum_(total)
        return float(total) / step.plan.supervised_tokens

    return train


def tokens_of(step: Step, feed: Feed) -> list[Tensor]:
    """The documents of a step, int64."""
    drawn = step.documents
    return [
        torch.from_numpy(feed.shards.tokens(document)[offset : offset + length].astype("int64"))
        for document, offset, length in zip(
            drawn.document.tolist(), drawn.offset.tolist(), drawn.length.tolist(), strict=True
        )
    ]


if __name__ == "__main__":
    answer(Job, measure)
