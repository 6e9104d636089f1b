"""Killed at any moment of a save, a job finds the newest complete checkpoint, whole, and goes on."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from seqmesh.trainer.checkpoints.keep import checkpoints, clear_leftovers
from seqmesh.trainer.checkpoints.load import newest_checkpoint
from seqmesh.trainer.checkpoints.manifest import CheckpointError
from tests.checkpoints import ALONE, is_step, plain_tensors, save_alone, saver_of

OPERATIONS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")


class KilledError(BaseException):
    """As a kill, nothing handles it."""


@contextmanager
def killed_at(moment: int) -> Iterator[Callable[[], bool]]:
    """The thread that writes a checkpoint ends just before its file system operation of this number, in a write after
    half of it. Yields whether it came so far."""
    numbers, reached = count(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, _dying(name, getattr(os, name), numbers, moment, reached))
        yield reached.is_set


def _dying(
    name: str, original: Callable[..., Any], numbers: Iterator[int], moment: int, reached: threading.Event
) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "checkpoint" and next(numbers) >= moment:
            if name == "write" and not reached.is_set():
                original(arguments[0], arguments[1][: len(arguments[1]) // 2])
            reached.set()
            raise KilledError
        return original(*arguments, **options)

    return call


def save(folder: Path, step: int) -> None:
    tensors = plain_tensors(step)
    with saver_of(folder, tensors, keep=1, background=True) as saver:
        saver.save(step, tensors, {"mark": step})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("again", [False, True])
def test_between_any_two_operations(tmp_path: Path, again: bool) -> None:
    """Of a save of a later step, or of the same one again, with one checkpoint kept."""
    moments = 0
    for moment in count():
        folder = tmp_path / str(moment)
        save_alone(folder, [1], keep=1)
        with killed_at(moment) as killed:
            try:
                save(folder, 1 if again else 2)
            except CheckpointError as error:
                assert "its thread was ended" in str(error)
                assert killed()
        if not killed():
            break
        moments += 1
        before = [path.name for path in checkpoints(folder)]
        clear_leftovers(folder, lambda _: None)
        newest = newest_checkpoint(folder, ALONE, pytest.fail)
        assert newest is not None
        assert is_step(newest, int(newest.name[-8:]))
        assert newest.name in before or again
        assert [path for path in folder.iterdir() if path.name.startswith(".")] == []
        save(folder, 3)  # and the job goes on
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    assert moments > 20
