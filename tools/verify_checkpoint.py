"""`seqmesh verify` of a checkpoint: which of its files are damaged. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from seqmesh.trainer.checkpoints.keep import is_checkpoint
from seqmesh.trainer.checkpoints.manifest import TENSORS, CheckpointError, problems, read_manifest, strangers


def holds_checkpoint(folder: Path) -> bool:
    """Whether it has the name of one, or the index of one."""
    return is_checkpoint(folder) or (folder / TENSORS).is_file()


def run(*, folder: Path, console: Console) -> None:
    """The whole command. Raises CheckpointError, after listing all problems, where the checkpoint is not whole."""
    found = list(problems(folder))
    for word in found:
        console.print(Text(word), soft_wrap=True)
    for name in strangers(folder):
        console.print(Text(f"{folder / name}: warning: is not part of the checkpoint"), soft_wrap=True)
    if found:
        raise CheckpointError(f"{folder} is not whole: a job passes it over and resumes from the one before")
    files = read_manifest(folder)
    size = sum(entry.bytes for entry in files.values())
    console.print(Text(f"{folder}: ok, {len(files)} files of {size:,} bytes"), soft_wrap=True)
