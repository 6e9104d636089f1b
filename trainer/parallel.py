"""The ranks of a job: one standing process group, made once at start, and what crosses it.

Every collective is called by every rank in the same order. Nothing here is global: `Ranks` is passed to who needs it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place: `rank` of `count`. With one rank there is no group and nothing is sent."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, values: Tensor) -> None:
        """Replace `values` by their sum over all ranks; the result has the same bits on every rank."""
        if self.count > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM)

    def from_first(self, number: int) -> int:
        """The first rank's number, on every rank."""
        if self.count == 1:
            return number
        box = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.broadcast(box, src=0)
        return int(box.item())

    def wait_for_all(self) -> None:
        if self.count > 1:
            dist.barrier()


@contextmanager
def join_ranks(timeout: float) -> Iterator[Ranks]:
    """Join the group that torchrun's environment describes; without it, be the only rank.

    timeout: seconds that any collective may take before it raises.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():  # not yet run on a GPU
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if count == 1:
        yield Ranks(0, 1, device)
        return
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield Ranks(dist.get_rank(), count, device)
    finally:
        dist.destroy_process_group()


def end_with_parent() -> None:
    """Kill this process as soon as the one that started it is gone.

    torchrun starts ranks in sessions of their own: killed with SIGKILL, it leaves them training, and a second start of
    the same job would run beside them.
    """
    parent = os.pidfd_open(os.getppid())

    def watch() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


class GradientBuffer:
    """All gradients of a model as one flat tensor, with `extra` numbers at its end: one reduction takes them all.

    Parameters' `.grad` are views of it, so autograd accumulates straight into it, over as many micro-batches as a
    rank has. A rank without documents has zeros.
    """

    def __init__(self, model: nn.Module, extra: int) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        first = parameters[0]
        if mixed := {p.dtype for p in parameters} - {first.dtype}:
            raise ValueError(f"parameters are {first.dtype} and {mixed}: must be of one dtype")
        self._flat = torch.zeros(sum(p.numel() for p in parameters) + extra, dtype=first.dtype, device=first.device)
        self.gradient = self._flat[: len(self._flat) - extra]
        self.extra = self._flat[len(self._flat) - extra :]
        parts = torch.split(self.gradient, [p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def zero_(self) -> None:
        self._flat.zero_()

    def reduce_(self, ranks: Ranks) -> None:
        """Sum over all ranks, never average: the loss was divided by the whole step's count."""
        ranks.sum_(self._flat)
