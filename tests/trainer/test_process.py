import gc
import os
import random

import numpy as np
import pytest
import torch

from seqmesh.trainer.process import CUBLAS_WORKSPACE, collecting, peak_memory, repeatable


class Cycle:
    """Garbage that only the collector finds."""

    left = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.left += 1

    def __del__(self) -> None:
        Cycle.left -= 1


def test_garbage_is_collected_at_its_step_and_at_no_other_time() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    Cycle.left, found = 0, []
    with collecting(3) as collect:
        for step in range(7, 14):
            Cycle()
            collect(step)
            assert not gc.isenabled()
            assert gc.get_freeze_count() > frozen
            found.append(Cycle.left)
    assert found == [0, 1, 0, 1, 2, 0, 1]  # at the first call, and at steps 9 and 12
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_without_a_number_python_collects_as_it_likes() -> None:
    with collecting(None) as collect:
        collect(1)
        assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collecting(1) as collect:
            collect(1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_repeatable_runs_draw_the_same_numbers_and_leave_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    drawn = []
    for _ in range(2):
        with repeatable(True, 2**40 + 3):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.backends.cudnn.deterministic
            assert os.environ[CUBLAS_WORKSPACE] == ":4096:8"
            drawn.append(draw())
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.deterministic
        assert CUBLAS_WORKSPACE not in os.environ
    assert drawn[0] == drawn[1]
    with repeatable(False, 0):
        assert not torch.are_deterministic_algorithms_enabled()


def test_memory_is_a_high_water_mark() -> None:
    before = peak_memory(torch.device("cpu"))
    block = bytearray(before + (32 << 20))
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory(torch.device("cpu")) > before + (16 << 20)
