"""Checkpoints: model, optimizer and loader state of one step, in one folder that appears only when it is complete.

`step-00000020/` holds model.safetensors, optimizer.safetensors, state.json and manifest.json with the checksum of each.
It is written under another name, synced and renamed; on loading every checksum is verified first. Nothing in it can
run code. Parameters are replicated over ranks here, so the first rank writes and every rank reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from seqmesh.loader.files import checksum, sync_file, sync_folder

VERSION = 1
MANIFEST = "manifest.json"
PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """every: steps between checkpoints (the last step is always saved). keep: complete checkpoints to keep."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged or of another job."""


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, keep: int
) -> Path:
    """Write the checkpoint of `step` (steps done) and then delete complete ones beyond the newest `keep`.

    state: JSON values. An earlier checkpoint goes only once the new one is durable.
    """
    final = folder / f"{PREFIX}{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    for leftover in folder.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)
    save_file(_contiguous(model.state_dict()), temporary / "model.safetensors")
    save_file(_contiguous(optimizer_tensors(model, optimizer)), temporary / "optimizer.safetensors")
    (temporary / "state.json").write_text(json.dumps({"version": VERSION, "step": step, **state}, indent=1))
    files = {path.name: checksum(path) for path in sorted(temporary.iterdir())}
    (temporary / MANIFEST).write_text(json.dumps({"version": VERSION, "files": files}, indent=1))
    for path in temporary.iterdir():
        sync_file(path)
    sync_folder(temporary)
    if final.exists():  # the same step again, after resuming from before it: never two halves under one name
        os.rename(final, temporary.with_suffix(".old.tmp"))
    os.rename(temporary, final)
    sync_folder(folder)
    for path in [*checkpoints(folder)[:-keep], *folder.glob(f".{PREFIX}*.tmp")]:
        shutil.rmtree(path)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Folders with the name of a complete checkpoint, the oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def newest_checkpoint(folder: Path, say: Callable[[str], object]) -> Path | None:
    """The newest checkpoint whose files all verify, None where there is none; `say` hears of each one passed over."""
    for path in reversed(checkpoints(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            say(f"passed over: {error}")
        else:
            return path
    return None


def verify(path: Path) -> None:
    """Raises CheckpointError naming the file that is missing or whose checksum differs."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: has no readable {MANIFEST} ({error})") from error
    for name, expected in files:
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: is missing")
        if checksum(path / name) != expected:
            raise CheckpointError(f"{path / name}: is damaged, its checksum differs from the manifest's")


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Verify, then fill model and optimizer; returns the state, with `step`. Raises CheckpointError."""
    verify(path)
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path}: has version {state.get('version')}, this seqmesh reads {VERSION}")
    try:
        model.load_state_dict(load_file(path / "model.safetensors"))
        fill_optimizer(model, optimizer, load_file(path / "optimizer.safetensors"))
    except (RuntimeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: does not fit this model: {error}") from error
    return state


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as named tensors, `<parameter>/<slot>`."""
    return {
        f"{name}/{slot}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def fill_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The reverse of `optimizer_tensors`."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        parameter = parameters[name]
        optimizer.state[parameter][slot] = value.to(parameter.device)


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
