"""A mark of the latest checkpoint that points at one which is not there yet, or whose predecessor is gone already."""

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from seqmesh.trainer.checkpoints.keep import checkpoints, clear_leftovers
from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.part import Saved, whole
from tests.checkpoints import ALONE, GRID, same, saver_of
from tests.ranks import start_process

KILLS = 10
SLOWLY = 0.01  # seconds that each sync takes more
SHAPES = {"model/w": (64, 64), "optimizer/w/exp_avg": (64, 64), "optimizer/step": ()}


def tensors_of(step: int) -> Saved:
    return {name: whole(torch.full(shape, float(step))) for name, shape in SHAPES.items()}


def train(pipe: Connection, folder: Path) -> None:
    """Resume, then save step after step in the background, the weights changing meanwhile; says what is saved."""
    sync = os.fsync

    def slow_sync(fd: Any) -> None:
        time.sleep(SLOWLY)
        sync(fd)

    os.fsync = slow_sync
    clear_leftovers(folder, print)
    newest = newest_checkpoint(folder, ALONE, print)
    tensors = tensors_of(0)
    step = load(newest, tensors, GRID).state["step"] if newest else 0
    saver = saver_of(folder, tensors, keep=1, background=True, say=pipe.send)
    pipe.send("ready")
    while True:
        step += 1
        for part in tensors.values():
            part.local.add_(1)
        saver.save(step, tensors, {"loader": {"step": step}})


@contextmanager
def running(folder: Path) -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    """The process, and what it says; at the end it is killed."""
    process, pipe = start_process(train, folder)
    try:
        yield process, pipe
    finally:
        process.kill()
        process.join()


def saved_step(pipe: Connection) -> int:
    """The next step that is said to be saved; EOFError where the process died."""
    while not (word := pipe.recv()).startswith("saved "):
        pass
    return int(word[-8:])


def said_steps(pipe: Connection) -> Iterator[int]:
    """Steps that were said to be saved until the process died."""
    with suppress(EOFError):
        while True:
            yield saved_step(pipe)


def test_a_kill_at_any_moment_leaves_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    generator = random.Random(28)
    said, halves = 0, 0
    for _ in range(KILLS):
        with running(tmp_path) as (process, pipe):
            assert pipe.recv() == "ready"
            for _ in range(generator.randrange(4)):  # saves, however slow the machine
                said = saved_step(pipe)
            time.sleep(generator.uniform(0, 0.1))  # about two saves more
            process.kill()
            said = max([said, *said_steps(pipe)])
        halves += len(list(tmp_path.glob(".step-*")))
        newest = newest_checkpoint(tmp_path, ALONE, print)
        if newest is None:
            assert said == 0
            continue
        tensors = tensors_of(0)
        state: dict[str, Any] = load(newest, tensors, GRID).state
        step = state["step"]
        assert step == state["loader"]["step"]
        assert same(tensors, tensors_of(step))
        assert said <= step <= said + 1  # complete, though perhaps killed before it could say so
        said = step
    assert said > 5
    assert halves > 3  # kills came in the middle of saves, and what they left was not taken for a checkpoint
    clear_leftovers(tmp_path, print)
    assert [path for path in tmp_path.iterdir() if path not in checkpoints(tmp_path)] == []
    assert len(checkpoints(tmp_path)) <= 2
