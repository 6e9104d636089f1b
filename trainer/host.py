"""Copies between a device and its host that run beside the computation, and the host memory that they use again.

A `Lane` is a queue of copies in one direction. On CUDA it is a stream of its own, so that copies engines work while the
device computes; on the CPU a copy is made at once. What waits for what is said in marks, never guessed, so that a lane
which copies as late as it may gives the same numbers. Nothing here knows of models.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Any  # stands for all copies that a lane was given up to then; a lane knows its own kind
SMALLEST_STEP_BITS = 9


class Lane(Protocol):
    """Copies in order, each after all that the computation was given before it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy. Both must live, and the source stay as it is, until the computation has waited for it."""

    def mark(self) -> Mark:
        """All copies that are queued by now."""

    def wait(self, mark: Mark) -> None:
        """What the computation is given from now on comes after those copies."""

    def follow(self, mark: Mark) -> None:
        """What this lane is given from now on comes after those copies, of this lane or another."""


class PromptLane:
    """Copies at once: for the CPU, where device and host are one memory."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass

    def follow(self, mark: Mark) -> None:
        pass


class StreamLane:
    """A CUDA stream. Not yet run on a GPU.

    The computation's stream is asked for each time: backward runs on whatever stream its forward pass had. Tensors need
    no `record_stream`: whoever queues a copy keeps them until the computation has waited for it, after which its stream
    may give their memory away; with `record_stream` it would come back at a time that nobody can foresee.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own is not typed

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def follow(self, mark: Mark) -> None:
        self._stream.wait_event(mark)


class HostPool:
    """Buffers of host memory, used again in the order in which they come back. pinned: as copies beside a CUDA device's
    work need it. nbytes: of all buffers, taken or free."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: defaultdict[int, deque[tuple[Tensor, Mark]]] = defaultdict(deque)
        self.nbytes = 0

    def take(self, nbytes: int, lane: Lane) -> Tensor:
        """At least so many bytes, for copies by `lane`, which wait until their former use has ended."""
        size = buffer_size(nbytes)
        if self._free[size]:
            buffer, mark = self._free[size].popleft()
            lane.follow(mark)
            return buffer
        self.nbytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def give(self, buffer: Tensor, mark: Mark) -> None:
        """Back to the pool; its use ends with `mark`."""
        self._free[len(buffer)].append((buffer, mark))


def buffer_size(nbytes: int) -> int:
    """Rounded up by an eighth at most, so that micro-batches of many sizes share few sizes of buffers."""
    step = 1 << max(nbytes.bit_length() - 4, SMALLEST_STEP_BITS)
    return -(-nbytes // step) * step


@dataclass(frozen=True, slots=True)
class Host:
    """Memory beside a device, and a lane in each direction: both may be busy at once."""

    pool: HostPool
    out: Lane
    back: Lane

    @classmethod
    def of(cls, device: torch.device) -> Host:
        if device.type == "cuda":
            return cls(HostPool(pinned=True), StreamLane(device), StreamLane(device))
        return cls(HostPool(pinned=False), PromptLane(), PromptLane())
