"""Checkpoints: model, optimizer and loader state of one step, in one folder that appears only when it is complete.

`step-00000020/` holds model.safetensors, optimizer.safetensors, state.json and manifest.json with the checksum of each.
It is written under another name, synced and renamed; on loading every checksum is verified first. Nothing in it can
run code. Tensors are whole, whatever mesh they were gathered from: any mesh loads them. The first rank writes, every
rank reads.
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
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from seqmesh.loader.files import checksum, sync_file, sync_folder
from seqmesh.trainer.part import Part, Saved
from seqmesh.trainer.replicas.saved import spread_step, whole_tensors

KINDS = ("model", "optimizer")
Tensors = dict[str, dict[str, Tensor]]  # "model" and "optimizer": whole tensors by name

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


def save_checkpoint(folder: Path, step: int, tensors: Tensors, state: dict[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of `step` (steps done) and then delete complete ones beyond the newest `keep`.

    tensors: from `gather_tensors`. state: JSON values. An earlier checkpoint goes only once the new one is durable.
    Raises OSError naming the file where the disk is full or refuses; what was there before stays.
    """
    final = folder / f"{PREFIX}{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    for leftover in folder.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)
    for name, part in tensors.items():
        _save(part, temporary / f"{name}.safetensors")
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
    """Verify, then fill a model that lies on this rank alone and its optimizer; otherwise as `load_saved`."""
    state = load_saved(path, whole_tensors(dict(model.named_parameters()), optimizer))
    spread_step(optimizer)
    return state


def load_saved(path: Path, saved: Saved) -> dict[str, Any]:
    """Verify, then copy into `saved`; returns the state, with `step`. Every rank calls it. Raises CheckpointError."""
    verify(path)
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path}: has version {state.get('version')}, this seqmesh reads {VERSION}")
    try:
        for kind in KINDS:
            _fill(_of_kind(saved, kind), load_file(path / f"{kind}.safetensors"))
    except (RuntimeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: does not fit this model: {error}") from error
    return state


def gather_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The same of a model that lies on this rank alone."""
    return gather_saved(whole_tensors(dict(model.named_parameters()), optimizer))


def gather_saved(saved: Saved) -> Tensors:
    """Whole named tensors on the CPU, whatever the mesh. Every rank must call it."""
    return {kind: {name: _whole(value) for name, value in _of_kind(saved, kind).items()} for kind in KINDS}


def _of_kind(saved: Saved, kind: str) -> Saved:
    return {name.removeprefix(f"{kind}/"): value for name, value in saved.items() if name.startswith(f"{kind}/")}


@torch.no_grad()
def _whole(tensor: Tensor | DTensor | Part) -> Tensor:
    if isinstance(tensor, Part):
        whole = torch.zeros(tensor.shape, dtype=tensor.local.dtype, device=tensor.local.device)
        whole[tensor.start : tensor.start + len(tensor.local)] = tensor.local
        dist.all_reduce(whole)
        return whole.cpu()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path} can not be written: {error}") from error


@torch.no_grad()
def _fill(saved: Saved, tensors: dict[str, Tensor]) -> None:
    if saved.keys() != tensors.keys():
        raise KeyError(f"{sorted(saved.keys() ^ tensors.keys())} are in one and not in the other")
    for name, target in saved.items():
        whole = tensors[name]
        if whole.shape != target.shape:
            raise KeyError(f"{name} has shape {list(whole.shape)}, the model's has {list(target.shape)}")
        if isinstance(target, Part):
            target.local.copy_(whole[target.start : target.start + len(target.local)])
        elif isinstance(target, DTensor):
            target.copy_(distribute_tensor(whole.to(target.device), target.device_mesh, target.placements))
        else:
            target.copy_(whole)
