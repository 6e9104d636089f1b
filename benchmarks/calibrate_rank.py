"""A rank of `seqmesh bench calibrate`: runs micro-batches of the real model, forward and backward, and times them.

`torchrun ... -m seqmesh.benchmarks.calibrate_rank JOB OUT` reads a `Job` as JSON; the first rank writes `Timings`. All
ranks run the same micro-batches at the same time, as in training: whole documents of the same lengths on each, and
rings over all ranks. Each turn begins together. Links are timed by messages of the sizes asked for, both ways at once.
What one thread of a CPU does alone is timed in CPU seconds, which other processes hardly change; all else by the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn

from seqmesh.benchmarks.asked import answer
from seqmesh.benchmarks.calibrate import Job, MicroBatch, Timings
from seqmesh.benchmarks.harness import Clock, interleave
from seqmesh.kernels.layout import Layout, Ring
from seqmesh.kernels.loss import cross_entropy_sum
from seqmesh.packer.pieces import chunk_sizes, piece_ranges
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.parallel import Ranks

SEED = 0


def measure(job: Job, ranks: Ranks) -> Timings:
    """Everything that the job asks for, round by round; the first round is not counted."""
    config = TypeAdapter(ModelConfig).validate_python(job.model)
    model = Transformer(config, seed=SEED).to(ranks.device)
    alone = ranks.device.type == "cpu" and torch.get_num_threads() == 1
    turns: dict[str, Callable[[], float]] = {}
    for each in job.batches:
        clock = time.process_time if alone and not each.rings else time.perf_counter
        turns[each.name] = partial(timed, prepare(each, model, config.vocab_size, ranks), ranks, clock)
    turns |= {f"{size} bytes": partial(timed, message(size, ranks), ranks) for size in job.messages}
    taken = interleave(turns, job.repeats)
    return Timings(
        device=ranks.device.type,
        batches={each.name: taken[each.name] for each in job.batches},
        messages={size: taken[f"{size} bytes"] for size in job.messages},
    )


def prepare(batch: MicroBatch, model: nn.Module, vocabulary: int, ranks: Ranks) -> Callable[[], None]:
    """Forward and backward of a micro-batch: the pieces that this rank holds of its rings, then whole documents."""
    pieces = [piece_positions(length, ranks) for length in batch.rings] + [torch.arange(n) for n in batch.whole]
    sizes = [len(piece) for piece in pieces]
    positions = torch.cat(pieces).to(ranks.device, torch.int32)
    bounds = list(accumulate(sizes, initial=0))
    members = tuple(range(ranks.count))
    rings = tuple(
        Ring(segment=i, start=bounds[i], ranks=members, index=ranks.rank, chunks=chunk_sizes(length, ranks.count))
        for i, length in enumerate(batch.rings)
    )
    layout = Layout(torch.tensor(bounds, dtype=torch.int32, device=ranks.device), max(sizes), rings)
    ids = torch.randint(vocabulary, (len(positions),), generator=torch.Generator().manual_seed(SEED)).to(ranks.device)

    def run() -> None:
        loss, _ = cross_entropy_sum(model(ids, positions, layout), ids)
        torch.autograd.backward(loss)

    return run


def piece_positions(length: int, ranks: Ranks) -> Tensor:
    """Positions of the tokens that this rank holds of a document over all ranks."""
    early, late = piece_ranges(length, ranks.count, ranks.rank)
    return torch.cat((torch.arange(*early), torch.arange(*late)))


def message(size: int, ranks: Ranks) -> Callable[[], None]:
    """Send so many bytes up and receive as many from below, as a ring does."""
    sent = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(sent)
    above, below = (ranks.rank + 1) % ranks.count, (ranks.rank - 1) % ranks.count

    def run() -> None:
        exchange = [dist.P2POp(dist.isend, sent, above), dist.P2POp(dist.irecv, received, below)]
        for request in dist.batch_isend_irecv(exchange):
            request.wait()

    return run


def timed(turn: Callable[[], None], ranks: Ranks, clock: Clock = time.perf_counter) -> float:
    """Seconds of one turn on this rank, begun by all together."""
    ranks.wait_for_all()
    _settle(ranks)
    begin = clock()
    turn()
    _settle(ranks)
    return clock() - begin


def _settle(ranks: Ranks) -> None:
    """Wait until the device has done what it was given."""
    if ranks.device.type == "cuda":  # not yet run on a GPU
        torch.cuda.synchronize(ranks.device)


if __name__ == "__main__":
    answer(Job, measure)
