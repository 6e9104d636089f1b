"""A rank of `seqmesh bench checkpoint`: saves and loads the same tensors in several ways, and times it.

`torchrun ... -m seqmesh.benchmarks.checkpoint_rank JOB OUT` reads a `Job` as JSON; the first rank writes an `Answer`.
All ranks begin each turn together, and the slowest one counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from seqmesh.benchmarks.asked import TIMEOUT, answer, by_rank
from seqmesh.benchmarks.checkpoints import ALONE, ASYNC, BESIDE, LOAD, ONE, SAVE, STALL, WHOLE, Answer, Job
from seqmesh.benchmarks.harness import interleave
from seqmesh.trainer.checkpoints.config import CheckpointConfig
from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.checkpoints.save import Saver
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Part, Saved, whole

ROW = 1_024  # numbers in a row of a tensor
TENSORS = 36  # parameters, each with two states of the optimizer
PRODUCT = 256  # rows of the matrices

Seconds = dict[str, float]


def measure(job: Job, ranks: Ranks) -> Answer:
    """Everything, round by round; the first round is not counted."""
    tensors, folder, steps = make_tensors(job, ranks), Path(job.folder), count(1)
    savers = {background: _saver(folder, tensors, ranks, background=background) for background in (False, True)}
    read: list[int] = []

    def save(*, background: bool) -> Saver:
        savers[background].save(next(steps), tensors, {})
        return savers[background]

    def one_stage() -> Seconds:
        return {ONE: _seconds(ranks, lambda: save(background=False))}

    def two_stages() -> Seconds:
        begin = time.perf_counter()
        stall = _seconds(ranks, lambda: save(background=True))
        savers[True].finish()
        return {STALL: stall, WHOLE: time.perf_counter() - begin}

    def beside() -> Seconds:
        products = partial(_products, torch.rand(PRODUCT, PRODUCT), job.products)
        alone = _seconds(ranks, products)
        ranks.wait_for_all()
        saver = save(background=True)
        both = _seconds(ranks, products)
        saver.finish()
        return {ALONE: alone, BESIDE: both}

    def verify_and_load() -> Seconds:
        def turn() -> None:
            path = newest_checkpoint(folder, ranks, lambda _: None)
            assert path is not None
            read.append(load(path, tensors, one_each(ranks)).bytes_read)

        return {LOAD: _seconds(ranks, turn)}

    candidates: dict[str, Callable[[], Seconds]] = {
        ONE: one_stage,
        STALL: two_stages,
        BESIDE: beside,
        LOAD: verify_and_load,
    }
    if job.peers:
        plain = {name: part.local for name, part in tensors.items() if part.shared}
        candidates[SAVE] = lambda: {SAVE: _seconds(ranks, lambda: torch_save(plain, checkpoint_id=folder / "torch"))}
        candidates[ASYNC] = partial(_torch_async, plain, folder / "torch", ranks)
    taken = interleave(candidates, job.repeats)
    return Answer(
        seconds=_slowest(list(taken.values())),
        size=_size(tensors),
        read=[int(size) for size in by_rank(read[-1], ranks)],
    )


def make_tensors(job: Job, ranks: Ranks) -> Saved:
    """Parameters, and the optimizer's state either whole on every rank or spread over them by rows."""
    rows = max(job.size // (3 * TENSORS * ROW * 4), ranks.count)
    first, end = rows * ranks.rank // ranks.count, rows * (ranks.rank + 1) // ranks.count
    tensors: Saved = {}
    for number in range(TENSORS):
        tensors[f"model/{number}"] = whole(torch.rand(rows, ROW))
        for slot in ("exp_avg", "exp_avg_sq"):
            part = Part(local=torch.rand(end - first, ROW), shape=torch.Size([rows, ROW]), offsets=(first, 0))
            tensors[f"optimizer/{number}/{slot}"] = part if job.spread else whole(torch.rand(rows, ROW))
    return tensors


def _saver(folder: Path, tensors: Saved, ranks: Ranks, *, background: bool) -> Saver:
    config = CheckpointConfig(keep=1, background=background)
    return Saver(folder, tensors, one_each(ranks), config=config, timeout=TIMEOUT, say=lambda _: None)


def _torch_async(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> Seconds:
    pending = []
    stall = _seconds(ranks, lambda: pending.append(async_save(tensors, checkpoint_id=folder)))
    for future in pending:
        future.result()  # type: ignore[union-attr]  # a response of another kind only on request
    return {ASYNC: stall}


def _products(matrix: Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)


def _seconds(ranks: Ranks, turn: Callable[[], object]) -> float:
    """Of one turn on this rank, begun by all together."""
    ranks.wait_for_all()
    begin = time.perf_counter()
    turn()
    return time.perf_counter() - begin


def _slowest(taken: list[list[Seconds]]) -> dict[str, list[float]]:
    """Over all ranks, by part and repeat."""
    own = {part: torch.tensor([each[part] for each in found]).double() for found in taken for part in found[0]}
    for seconds in own.values():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {part: seconds.tolist() for part, seconds in own.items()}


def _size(tensors: Saved) -> int:
    """Bytes of all tensors, each counted once."""
    return sum(value.shape.numel() * 4 for value in tensors.values())


if __name__ == "__main__":
    answer(Job, measure)
