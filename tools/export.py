"""`seqmesh export`: the parameters of a checkpoint as safetensors, with the model's settings as config.json.

By our names in one file, or as a Llama model that `transformers` loads. The checkpoint is verified first. Optimizer and
loader state stay behind. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text
from safetensors.torch import save_file
from torch import Tensor

from seqmesh.loader.files import sync_file, sync_folder
from seqmesh.trainer.checkpoints.keep import checkpoints
from seqmesh.trainer.checkpoints.manifest import STATE
from seqmesh.trainer.checkpoints.read import read_model
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.huggingface import save_huggingface

WEIGHTS, CONFIG = "model.safetensors", "config.json"

Format = Literal["safetensors", "huggingface"]


def run(*, checkpoint: Path, out: Path, format: Format, dtype: str | None, console: Console | None = None) -> None:
    """The whole command. checkpoint: or a run folder, for its newest. dtype: name of a torch type, None for that of
    training. Raises CheckpointError where the checkpoint is not whole, FileExistsError where `out` exists, ValueError
    where the model is none of Hugging Face's."""
    console = console or Console()
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another folder, or remove it")
    path = next(reversed(checkpoints(checkpoint)), checkpoint)
    tensors = read_model(path)
    config = TypeAdapter(ModelConfig).validate_python(json.loads((path / STATE).read_bytes())["model"])
    if dtype is not None:
        wanted = getattr(torch, dtype)
        tensors = {name: tensor.to(wanted) for name, tensor in tensors.items()}
    write_folder(out, tensors, config, format)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    console.print(Text(f"wrote {out}: {numbers:,} parameters of {path}"), soft_wrap=True)


def write_folder(out: Path, tensors: dict[str, Tensor], config: ModelConfig, format: Format) -> None:
    """Weights and settings in a new folder, durably."""
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if format == "huggingface":
            save_huggingface(temporary, config, tensors)
        else:
            temporary.mkdir(parents=True)
            save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
            (temporary / CONFIG).write_text(json.dumps(asdict(config), indent=1) + "\n")
        for path in temporary.iterdir():
            sync_file(path)
        sync_folder(temporary)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(out.parent)
