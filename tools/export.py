"""`seqmesh export`: the parameters of a checkpoint as model.safetensors, with the model's shape as config.json.

The checkpoint is verified first. Optimizer and loader state stay behind. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import save_file
from torch import Tensor

from seqmesh.loader.files import sync_file, sync_folder
from seqmesh.trainer.checkpoints.keep import checkpoints
from seqmesh.trainer.checkpoints.manifest import STATE
from seqmesh.trainer.checkpoints.read import read_model

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def run(*, checkpoint: Path, out: Path, dtype: str | None, console: Console | None = None) -> None:
    """The whole command. dtype: name of a torch type, None for that of training. Raises CheckpointError where the
    checkpoint is not whole, FileExistsError where `out` exists."""
    console = console or Console()
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another folder, or remove it")
    path = newest_of(checkpoint)
    tensors = read_model(path)
    config = json.loads((path / STATE).read_bytes())["model"]
    if dtype is not None:
        wanted = getattr(torch, dtype)
        tensors = {name: tensor.to(wanted) for name, tensor in tensors.items()}
    write_folder(out, tensors, config)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    size = (out / WEIGHTS).stat().st_size
    console.print(Text(f"wrote {out}: {numbers:,} parameters of {path}, {size:,} bytes"), soft_wrap=True)


def newest_of(path: Path) -> Path:
    """The newest checkpoint of a run folder; the path itself where it is none."""
    return next(reversed(checkpoints(path)), path)


def write_folder(out: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Weights and configuration in a new folder."""
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    (temporary / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    for name in (WEIGHTS, CONFIG):
        sync_file(temporary / name)
    sync_folder(temporary)
    os.rename(temporary, out)
    sync_folder(out.parent)
