"""Saving in two stages: a copy of the tensors, which the step waits for, then the files, which it does not.

    with Saver(folder, tensors, grid, config=config, timeout=60, say=print) as saver:
        saver.save(step, tensors, state)    # the optimizer may step as soon as this returns
        saver.check()                       # once a step: says what was saved, raises what went wrong

Every rank copies and writes its own part (`layout`) from a thread, which seldom needs the interpreter: writing, hashing
and syncing go on without it. The first rank waits for the others' parts, writes index, state and manifest, and gives
the folder its name; every file is synced before that, and older checkpoints go only after it. No collective is called
in the second stage. What fails there is raised on every rank, at the next `check` or save, or at the end.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from seqmesh.trainer.checkpoints.board import AbandonedError, Board
from seqmesh.trainer.checkpoints.config import CheckpointConfig
from seqmesh.trainer.checkpoints.files import complete, write_file
from seqmesh.trainer.checkpoints.index import Entry, RankFile
from seqmesh.trainer.checkpoints.keep import checkpoint_path, temporary_path
from seqmesh.trainer.checkpoints.layout import lay_out
from seqmesh.trainer.checkpoints.manifest import STATE, TENSORS, VERSION, CheckpointError, FileEntry
from seqmesh.trainer.grid import Grid
from seqmesh.trainer.parallel import RankError, open_store
from seqmesh.trainer.part import Saved

State = dict[str, Any]
WORTH_SAYING = 0.1  # seconds of waiting for the save before


class Saver:
    """Saves into `folder`, a save at a time. Every rank makes one, with tensors of the names, shapes and parts that
    every save has, and calls `save` for the same steps. timeout: seconds that ranks wait for each other's parts."""

    def __init__(
        self,
        folder: Path,
        tensors: Saved,
        grid: Grid,
        *,
        config: CheckpointConfig,
        timeout: float,
        say: Callable[[str], object],
    ) -> None:
        self._folder = folder
        self._ranks = ranks = grid.world
        self._config = config
        self._say = say
        self._file, self._index = lay_out(tensors, grid)
        self._buffer = torch.zeros(self._file.size, dtype=torch.uint8, pin_memory=ranks.device.type == "cuda")
        self._mark = f"{ranks.from_first(secrets.randbits(31)):08x}"
        self._board = Board(open_store(ranks, f"checkpoints/{self._mark}", timeout), ranks, timeout)
        self._number = 0
        self._thread: threading.Thread | None = None
        self._failure: str | None = ""  # None: nobody knows
        self._saving = folder  # the checkpoint under way

    def save(self, step: int, tensors: Saved, state: State) -> None:
        """Copy the tensors, then write the checkpoint of `step` (steps done). state: JSON values; the first rank's is
        kept. Waits for a save that is under way, and says so. Raises CheckpointError where that one failed, and where
        this one fails if there is no background, ValueError where tensors are others than at the start."""
        began = time.perf_counter()
        under_way = self._thread is not None and self._thread.is_alive()
        self.finish()
        if under_way and (waited := time.perf_counter() - began) > WORTH_SAYING:
            self._say(f"the checkpoint of step {step} waited {waited:.1f} s for the one before")
        stage(self._file, tensors, self._buffer)
        self._number += 1
        self._saving = checkpoint_path(self._folder, step)
        rest = {STATE: _state_bytes(step, state), TENSORS: self._index} if self._ranks.is_first else {}
        self._thread = threading.Thread(target=self._second_stage, args=(step, rest), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._config.background:
            self.finish()

    def check(self) -> None:
        """Say that a save is done, if one has ended. Raises CheckpointError where it failed."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way. Raises CheckpointError, on every rank alike, where it failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._failure:
            raise CheckpointError(self._failure)
        if self._failure is not None:
            self._say(f"saved {self._saving}")

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the save under way also where the job fails, but not for ranks that are lost. What fails there is
        likely to be the reason, and is raised instead."""
        if isinstance(error, RankError):
            self._board.abandon()
        try:
            self.finish()
        except CheckpointError as failure:
            raise CheckpointError(f"{failure} ({error})" if error else str(failure)) from error

    def _second_stage(self, step: int, rest: dict[str, bytes]) -> None:
        """Leaves what went wrong in `_failure`."""
        self._failure = f"{self._saving} was not saved: its thread was ended"
        try:
            temporary = temporary_path(self._folder, step, self._mark)
            self._board.post(self._number, self._write_part(temporary))
            if self._ranks.is_first:
                self._board.announce(self._number, self._complete(temporary, rest))
            self._failure = self._board.outcome(self._number)
        except AbandonedError:
            self._failure = None
        except Exception as error:
            self._failure = f"{self._saving} was not saved: {error}"

    def _write_part(self, temporary: Path) -> str:
        """This rank's file, in words for the first rank."""
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            entry = write_file(temporary / self._file.name, [self._file.header, self._buffer.numpy().data])
        except OSError as error:
            return json.dumps({"error": str(error)})
        return json.dumps({"name": self._file.name, "entry": asdict(entry)})

    def _complete(self, temporary: Path, rest: dict[str, bytes]) -> str:
        """What went wrong, on whichever rank; empty where the checkpoint is complete."""
        try:
            parts = [json.loads(text) for text in self._board.parts(self._number)]
            if failed := next((part["error"] for part in parts if "error" in part), ""):
                return str(failed)
            files = {part["name"]: FileEntry(**part["entry"]) for part in parts}
            complete(temporary, self._saving, files, rest, keep=self._config.keep)
        except OSError as error:  # TimeoutError is one
            return f"{self._saving} was not saved: {error}"
        return ""


@torch.no_grad()
def stage(file: RankFile, tensors: Saved, buffer: Tensor) -> None:
    """Copy this rank's part of the tensors, as they are now, into `buffer` [file.size] uint8."""
    for entry in file.entries:
        local = tensors[entry.name].local
        if local.shape != entry.sizes or local.dtype != entry.dtype:
            raise ValueError(
                f"{entry.name} is {local.dtype} {list(local.shape)} on this rank: it was {entry.dtype} "
                f"{list(entry.sizes)} when saving was prepared"
            )
        _room(buffer, entry).copy_(local, non_blocking=True)
    if buffer.is_pinned():  # not yet run on a GPU
        torch.cuda.current_stream().synchronize()


def _room(buffer: Tensor, entry: Entry) -> Tensor:
    return buffer[entry.begin : entry.end].view(entry.dtype).view(entry.sizes)


def _state_bytes(step: int, state: State) -> bytes:
    return json.dumps({"version": VERSION, "step": step, **state}, indent=1).encode() + b"\n"
