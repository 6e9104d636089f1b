"""Llama-style weights in Hugging Face's folders: config.json and safetensors, in one file or in several with an index.

    config = huggingface_config(folder)
    load_huggingface(folder, config, parts_of(model))
    save_huggingface(folder, config, tensors)

One tensor at a time, so no more memory than the model has; a process reads only what it holds: of some layers, of each
tensor a part. Files in other formats, pickles above all, are not read, and nothing is fetched. What config.json can
say: `llama`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from seqmesh.loader.files import atomic_write, sync_file, sync_folder
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import STACK
from seqmesh.trainer.models.llama import check_agreement, from_json, their_names, to_json
from seqmesh.trainer.models.transformer import parameter_shapes
from seqmesh.trainer.part import Part

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5_000_000_000
BALANCE = ".balance"  # how names of biases of experts' choices end


def huggingface_config(folder: Path) -> ModelConfig:
    """The settings of the model in a folder. Raises FileNotFoundError, or ValueError naming the file and the field that
    this model can not do."""
    data = _read_json(folder / CONFIG)
    try:
        return from_json(data)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


@torch.no_grad()
def load_huggingface(folder: Path, config: ModelConfig, parts: Mapping[str, Part]) -> None:
    """Fill a model's parameters, by our names, from the weights in a folder: in place, whatever their dtype and device,
    what this process holds of each. config: of the model.

    Raises FileNotFoundError, or ValueError naming file and tensor, before anything is filled: where the model and that
    of config.json are not alike, a tensor is missing, or there for nothing, or of another shape, or a file is no
    safetensors.
    """
    check_agreement(config, huggingface_config(folder), str(folder / CONFIG))
    wanted: dict[str, Part] = {}
    for name in parts:
        wanted |= _spelled(parts[name], their_names(name, config.experts))
    for path, names in _check(folder, config).items():
        with _opened(path) as file:
            for name in names:
                if (part := wanted.get(name)) is not None and part.local.numel():
                    part.local.copy_(file.get_slice(name)[part.place])


def save_huggingface(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    file_bytes: int = FILE_BYTES,
    max_positions: int | None = None,
    end_of_document: int | None = None,
) -> None:
    """Write a model for `transformers.AutoModelForCausalLM.from_pretrained`: config.json, last of all, and safetensors
    of about file_bytes at most, with an index where they are several.

    tensors: whole, by our names, looked up one at a time, in their own dtype. max_positions: the longest text that the
    model is meant for; None: transformers' default. end_of_document: the id that ends a text. Raises ValueError naming
    what Llama can not say of the settings, or the tensor that is missing, too many or misshapen; FileExistsError where
    the folder holds a model; OSError where it can not be written.
    """
    data = to_json(config)
    _check_ours(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    if used := next((path for path in (folder / CONFIG, *folder.glob("*.safetensors")) if path.exists()), None):
        raise FileExistsError(f"{used} exists: give another folder, or remove it")
    parts, total, dtype = _write_parts(folder, tensors, config.experts, file_bytes)
    _publish(folder, parts, total)
    data |= {"torch_dtype": dtype, "bos_token_id": None, "eos_token_id": end_of_document}
    if max_positions is not None:
        data["max_position_embeddings"] = max_positions
    atomic_write(folder / CONFIG, _json(data))


def _spelled(part: Part, names: list[str]) -> dict[str, Part]:
    """A part by their name, or, of a stack of matrices, each matrix by its own."""
    if len(part.shape) < STACK:
        return dict.fromkeys(names, part)
    return {name: _matrix(part, number) for number, name in enumerate(names)}


def _matrix(stack: Part, number: int) -> Part:
    """What is here of a matrix in a stack: nothing, where that is elsewhere."""
    here, (first, *offsets) = stack.local, stack.offsets
    held = first <= number < first + len(here)
    local = here[number - first] if held else here.new_empty(0, *here.shape[2:])
    return Part(local=local, shape=stack.shape[1:], offsets=tuple(offsets))


def _check(folder: Path, config: ModelConfig) -> dict[Path, list[str]]:
    """Which tensors are in which file. Raises ValueError unless the files hold all of the model and nothing more."""
    shapes = _their_shapes(config)
    files: dict[Path, list[str]] = {}
    found: set[str] = set()
    for path in _weight_files(folder):
        with _opened(path) as file:
            names = [name for name in file.keys() if not _is_spare(name, config)]  # noqa: SIM118 -- it is no mapping
            for name in names:
                if name not in shapes:
                    raise ValueError(f"{path}: holds {name}, which the model has not")
                if name in found:
                    raise ValueError(f"{path}: holds {name}, which another file holds, too")
                shape, expected = list(file.get_slice(name).get_shape()), list(shapes[name])
                if shape != expected:
                    raise ValueError(f"{path}: {name} is {shape}, in the model {expected}")
                found.add(name)
            files[path] = names
    if missing := shapes.keys() - found:
        raise ValueError(f"{folder}: lacks {', '.join(sorted(missing))}")
    return files


def _their_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """By their names."""
    shapes: dict[str, torch.Size] = {}
    for name, shape in parameter_shapes(config).items():
        shapes |= dict.fromkeys(their_names(name, config.experts), shape[1:] if len(shape) == STACK else shape)
    return shapes


def _is_spare(name: str, config: ModelConfig) -> bool:
    """Whether a tensor says what is known without it: rotary frequencies in old files, the head of a tied model."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")


def _weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}: other formats are not read")
        return [folder / SINGLE]
    names = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{folder / INDEX}: weight_map must say the file of each tensor")
    for name in sorted(set(names.values())):
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX}: {name!r} is no name of a file in this folder")
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing: {INDEX} names it")
    return [folder / name for name in sorted(set(names.values()))]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error


def _check_ours(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    shapes = parameter_shapes(config)
    biases = {name for name in tensors if name.endswith(BALANCE)}
    if moved := sorted(name for name in biases if tensors[name].any()):
        raise ValueError(
            f"{moved[0]} is not 0: Llama-style weights can not say biases of experts' choices; a model has none if "
            "balance_rate is 0"
        )
    if missing := shapes.keys() - tensors.keys():
        raise ValueError(f"tensors lack {', '.join(sorted(missing))}")
    if spare := tensors.keys() - shapes.keys() - biases:
        raise ValueError(f"tensors have {', '.join(sorted(spare))}, which the model has not")
    for name in shapes:
        if tensors[name].shape != shapes[name]:
            raise ValueError(f"tensors: {name} is {list(tensors[name].shape)}, in the model {list(shapes[name])}")


def _write_parts(
    folder: Path, tensors: Mapping[str, Tensor], experts: int | None, most: int
) -> tuple[dict[Path, list[str]], int, str]:
    """Files under temporary names with what they hold, all their bytes, and the dtype."""
    parts: dict[Path, list[str]] = {}
    total, dtype, pending, size = 0, "", dict[str, Tensor](), 0
    for name in tensors:
        for their, tensor in _apart(tensors[name], their_names(name, experts)).items():
            if pending and size + tensor.nbytes > most:
                parts |= _write_part(folder, len(parts), pending)
                pending, size = {}, 0
            pending[their] = tensor
            size, total = size + tensor.nbytes, total + tensor.nbytes
            dtype = dtype or str(tensor.dtype).removeprefix("torch.")
    return parts | _write_part(folder, len(parts), pending), total, dtype


def _write_part(folder: Path, number: int, tensors: dict[str, Tensor]) -> dict[Path, list[str]]:
    path = folder / f"{SINGLE}.{number}.tmp"
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} can not be written: {error}") from error
    sync_file(path)
    return {path: list(tensors)}


def _publish(folder: Path, parts: Mapping[Path, list[str]], total: int) -> None:
    """Give the files their names, which say how many there are."""
    if len(parts) == 1:
        next(iter(parts)).rename(folder / SINGLE)
        return
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(parts.items(), 1):
        final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.rename(folder / final)
        places |= dict.fromkeys(names, final)
    sync_folder(folder)
    atomic_write(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": places}))


def _apart(tensor: Tensor, names: list[str]) -> dict[str, Tensor]:
    """As it is written: a stack matrix by matrix."""
    matrices = tensor.unbind() if tensor.ndim == STACK else [tensor] * len(names)
    return {name: _plain(matrix) for name, matrix in zip(names, matrices, strict=True)}


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, with memory of its own: views of one buffer can not be written."""
    plain = tensor.detach().cpu().contiguous()
    return plain.clone() if plain.untyped_storage().nbytes() > plain.nbytes else plain


def _json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=1).encode() + b"\n"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: a Hugging Face model has one") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold an object")
    return data
