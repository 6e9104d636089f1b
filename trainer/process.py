"""The Python process around the loop: when garbage is collected, whether results repeat bit by bit, how much memory.

What is changed here is changed back at the end of the block.
"""

from __future__ import annotations

import gc
import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def collecting(every: int | None) -> Iterator[Callable[[int], None]]:
    """Garbage is collected by the function that this gives, called after every step with its number, and at no other
    time: all ranks pause at the same step, instead of one after the other while the rest wait for it.

    The first call collects all there is and sets it aside for good (`gc.freeze`): what the start made lives as long as
    the job. every: steps between collections; None: Python decides, and the function does nothing.
    """
    if every is None:
        yield lambda _step: None
        return
    was_on, frozen = gc.isenabled(), False

    def collect(step: int) -> None:
        nonlocal frozen
        if not frozen:
            gc.disable()
            gc.collect()
            gc.freeze()
            frozen = True
        elif step % every == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if frozen:
            gc.unfreeze()
        if was_on:
            gc.enable()


@contextmanager
def repeatable(wanted: bool, seed: int) -> Iterator[None]:
    """Where wanted, only algorithms that give the same bits every time (an operation that has none raises), and all
    generators seeded. To be entered before CUDA is used."""
    if not wanted:
        yield
        return
    before, workspace = torch.are_deterministic_algorithms_enabled(), os.environ.get(CUBLAS_WORKSPACE)
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            del os.environ[CUBLAS_WORKSPACE]


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: allocated on a GPU; of a process on a CPU, with everything in it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
