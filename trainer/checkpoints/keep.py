"""Which checkpoints a run folder holds, and which of them go.

A checkpoint is a folder `step-00000020`. What is being written or deleted has another name, begins with a dot and ends
in `.tmp`: a half folder never has the name of a whole one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from seqmesh.loader.files import sync_folder

_NAME = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.(step-\d{8,})\.old\.tmp")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def is_checkpoint(path: Path) -> bool:
    """Whether it has the name of a checkpoint."""
    return _NAME.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """Of a checkpoint's folder."""
    return int(path.name.rpartition("-")[2])


def checkpoints(folder: Path) -> list[Path]:
    """Folders with the name of a complete checkpoint, the oldest first."""
    return sorted((path for path in folder.glob("step-*") if is_checkpoint(path)), key=step_of)


def temporary_path(folder: Path, step: int, mark: str) -> Path:
    """Where a checkpoint is written. mark: of this start of the job."""
    return folder / f".{checkpoint_path(folder, step).name}.{mark}.tmp"


def clear_leftovers(folder: Path, say: Callable[[str], object]) -> None:
    """Remove what a killed job was writing or deleting. To be called before any rank saves."""
    for path in sorted(folder.glob(".step-*.tmp")):
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (folder / replaced[1]).exists():
            os.rename(path, folder / replaced[1])  # killed between the two renames of `publish`
            continue
        say(f"removed {path}, which a killed job left")
        shutil.rmtree(path)


def publish(written: Path, final: Path) -> None:
    """Give a finished folder its name, durably. One that has it already, of the same step before a resume, goes."""
    replaced = final.with_name(f".{final.name}.old.tmp")
    if final.exists():
        os.rename(final, replaced)
    os.rename(written, final)
    sync_folder(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def drop_older(final: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints up to `final`. Those of later steps were passed over when the job
    resumed from before them, and are replaced when it gets there."""
    upto = [path for path in checkpoints(final.parent) if step_of(path) <= step_of(final)]
    for path in upto[:-keep]:
        going = path.with_name(f".{path.name}.gone.tmp")
        os.rename(path, going)
        shutil.rmtree(going)
