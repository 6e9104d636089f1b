"""Weights to and from transformers: the same logits from packed rows as from its own models, and clear refusals."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from seqmesh.kernels.tensor_parallel import Peers
from seqmesh.loader.embedded import Loader
from seqmesh.trainer.config import TrainConfig, load_config
from seqmesh.trainer.grid import alone
from seqmesh.trainer.job import make_job
from seqmesh.trainer.loop import run as run_job
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.huggingface import huggingface_config, load_huggingface, save_huggingface
from seqmesh.trainer.models.llama import from_json, to_json
from seqmesh.trainer.models.presets import PRESETS
from seqmesh.trainer.models.transformer import Transformer, parts_of
from seqmesh.trainer.saving import resume
from seqmesh.trainer.train import loader_settings
from tests.kernels.reference import layout_of, positions_of, relative_error
from tests.support import make_set

LENGTHS = [9, 1, 23, 4]
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
THEIRS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama 3.1, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True, rope_parameters=SCALED, rms_norm_eps=1e-5)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3, sliding_window=5)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    ),
}
SMALL = ModelConfig(vocab_size=50, width=32, layers=2, heads=4, kv_heads=2, ffn_width=40, block="serial", init_std=0.2)
OURS = {
    "llama": replace(SMALL, biases="all", rope_scaling=PRESETS["llama-3.1-8b"].rope_scaling),
    "llama, tied": replace(SMALL, head_width=16, tied_embeddings=True, rope_base=777.0),
    "mistral": replace(SMALL, windows=(5,)),
    "mixtral": replace(SMALL, experts=4, norm_eps=1e-4),
    "qwen2": replace(SMALL, biases="qkv"),
    "qwen2, windows": replace(SMALL, biases="qkv", windows=(None, 6), tied_embeddings=True),
}


def shaken(model: nn.Module) -> Any:
    """The model with weights that all matter: neither norms of 1 nor biases of 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    config = huggingface_config(folder)
    model = Transformer(config, seed=0).to(dtype)
    load_huggingface(folder, config, parts_of(model))
    return model


def random_ids() -> Tensor:
    return torch.randint(50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def check_logits(ours: Transformer, theirs: Any) -> None:
    """Packed in one row here, document by document there; both in float32, also against ours in float64."""
    ids = random_ids()
    alone = torch.cat([theirs(document.unsqueeze(0)).logits[0] for document in torch.split(ids, LENGTHS)])
    packed = ours(ids, positions_of(LENGTHS), layout_of(LENGTHS))
    assert alone.dtype == packed.dtype == torch.float32
    exact = ours.double()(ids, positions_of(LENGTHS), layout_of(LENGTHS))
    assert relative_error(packed, alone) <= 2e-6
    assert relative_error(alone, exact) <= 2e-6


@pytest.mark.parametrize("name", THEIRS)
def test_their_weights_give_their_logits(name: str, tmp_path: Path) -> None:
    theirs = shaken(THEIRS[name]())
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if name == "llama" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (name == "llama")
    check_logits(loaded(tmp_path), theirs)


@pytest.mark.parametrize("name", OURS)
def test_our_weights_give_our_logits(name: str, tmp_path: Path) -> None:
    model = shaken(Transformer(OURS[name], seed=0))
    tensors = dict(model.named_parameters())
    save_huggingface(tmp_path, OURS[name], tensors, file_bytes=20_000, max_positions=99, end_of_document=7)
    assert len(list(tmp_path.glob("model-0*-of-0*.safetensors"))) > 2
    assert not list(tmp_path.glob("*.tmp"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (theirs.config.eos_token_id, theirs.config.max_position_embeddings) == (7, 99)
    assert huggingface_config(tmp_path) == OURS[name]
    again = loaded(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in tensors.items())
    check_logits(model, theirs)


def test_biases_of_choices_and_settings_that_mixtral_has_not_are_refused(tmp_path: Path) -> None:
    config = OURS["mixtral"]
    tensors = dict(Transformer(config, seed=0).named_parameters())
    balance = {f"blocks.{layer}.mlp.balance": torch.zeros(4) for layer in range(config.layers)}
    save_huggingface(tmp_path / "still", config, tensors | balance)
    with pytest.raises(ValueError, match=r"blocks.1.mlp.balance is not 0: Llama-style weights can not say biases"):
        save_huggingface(tmp_path / "moved", config, tensors | balance | {"blocks.1.mlp.balance": torch.ones(4)})
    for change in ({"biases": "qkv"}, {"windows": (4, None)}):
        with pytest.raises(ValueError, match="with experts can only say one window, or none"):
            to_json(replace(config, **change))


@pytest.mark.parametrize("config", [SMALL, OURS["mixtral"]], ids=["llama", "mixtral"])
def test_a_piece_of_a_model_reads_its_own(tmp_path: Path, config: ModelConfig) -> None:
    """Some of the layers, and of each a peer's share; files must still hold the whole model."""
    whole = shaken(Transformer(config, seed=0))
    save_huggingface(tmp_path, config, dict(whole.named_parameters()), file_bytes=20_000)
    for layers, rank in itertools.product([range(1), range(1, config.layers)], range(2)):
        piece = Transformer(config, seed=1, layers=[layers], peers=Peers(rank=rank, count=2))
        parts = parts_of(piece)
        load_huggingface(tmp_path, config, parts)
        for name, part in parts.items():
            assert torch.equal(part.local, whole.get_parameter(name)[part.place]), name


def test_half_precision_is_kept_and_widened(tmp_path: Path) -> None:
    model = Transformer(SMALL, seed=0).bfloat16()
    save_huggingface(tmp_path, SMALL, dict(model.named_parameters()))
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    wide = loaded(tmp_path, torch.float64)
    assert torch.equal(wide.get_parameter("embedding.weight"), model.get_parameter("embedding.weight").double())


def test_views_of_one_buffer_are_written_apart(tmp_path: Path) -> None:
    model = Transformer(SMALL, seed=0)
    flat = torch.cat([parameter.detach().ravel() for parameter in model.parameters()])
    parts = torch.split(flat, [parameter.numel() for parameter in model.parameters()])
    tensors = {name: part.view_as(p) for (name, p), part in zip(model.named_parameters(), parts, strict=True)}
    save_huggingface(tmp_path, SMALL, tensors)
    assert (tmp_path / "model.safetensors").stat().st_size < flat.nbytes + 10_000
    assert torch.equal(loaded(tmp_path).get_parameter("norm.weight"), model.get_parameter("norm.weight"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_huggingface(tmp_path / "model", SMALL, dict(Transformer(SMALL, seed=3).named_parameters()))
    return tmp_path / "model"


def change_config(folder: Path, **fields: Any) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2': must be one of llama, mistral, mixtral, qwen2"),
        ({"hidden_size": None}, "hidden_size is None: must be a number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': this model knows 'silu' only"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"mlp_bias": True}, "attention_bias is False and mlp_bias True"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling is of type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling lacks low_freq_factor, high_freq_"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters is .*: must be one set of numbers"),
        ({"model_type": "mixtral", "num_experts_per_tok": 4}, "num_experts_per_tok is 4: this model knows 2 only"),
        ({"rms_norm_eps": "small"}, "is no model: norm_eps: Input should be a valid number"),
        ({"num_key_value_heads": 3}, "is no model: kv_heads is 3: must divide heads, 4"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked"]}, "layer_types has chunked"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": 3}, "layer_types is 3: must be a list"),
    ],
    ids=str,
)
def test_what_this_model_can_not_do_is_named(folder: Path, fields: dict[str, Any], message: str) -> None:
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=rf"model/config.json: {message}"):
        huggingface_config(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"model: lacks model.layers.1.mlp.up_proj.weight"),
        (lambda w: w.update(odd=torch.ones(1)), r"model.safetensors: holds odd, which the model has not"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(31)}),
            r"model.safetensors: model.norm.weight is \[31\], in the model \[32\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_filled(
    folder: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    model = Transformer(SMALL, seed=0)
    with pytest.raises(ValueError, match=message):
        load_huggingface(folder, SMALL, parts_of(model))
    fresh = Transformer(SMALL, seed=0).get_parameter("embedding.weight")
    assert torch.equal(model.get_parameter("embedding.weight"), fresh)


def test_files_that_are_missing_damaged_or_elsewhere_are_named(folder: Path) -> None:
    parts = parts_of(Transformer(SMALL, seed=0))
    index = folder / "model.safetensors.index.json"
    for name, error, message in (
        ("model-1.safetensors", FileNotFoundError, "model-1.safetensors is missing: model.safetensors.index.json"),
        ("../model/model.safetensors", ValueError, "'../model/model.safetensors' is no name of a file"),
    ):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(error, match=message):
            load_huggingface(folder, SMALL, parts)
    index.unlink()
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model.safetensors is no readable safetensors file"):
        load_huggingface(folder, SMALL, parts)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor"):
        load_huggingface(folder, SMALL, parts)


def test_spare_tensors_of_old_files_are_passed_over(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors")
    change_config(folder, tie_word_embeddings=True)
    assert loaded(folder).head is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": "parallel"}, "block is parallel: Llama-style weights can only say serial"),
        ({"activation": "gelu"}, "activation is gelu"),
        ({"norm": "layer"}, "norm is layer"),
        ({"heads": 6, "head_width": 8}, "heads is 6: transformers wants it to divide width, 32"),
        ({"windows": (3, 4)}, r"windows is \[3, 4\]: Llama-style weights can only say one window"),
        ({"windows": (3, None)}, r"windows is \[3, None\] and biases none"),
        ({"windows": (3,), "biases": "all"}, r"windows is \[3\] and biases all"),
    ],
    ids=str,
)
def test_a_model_that_llama_can_not_say_is_not_saved(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = replace(SMALL, **change)
    with pytest.raises(ValueError, match=message):
        save_huggingface(tmp_path / "out", config, {})
    assert not (tmp_path / "out").exists()


def test_a_save_is_refused_over_another_or_with_other_tensors(folder: Path, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = dict(Transformer(SMALL, seed=0).named_parameters())
    with pytest.raises(FileExistsError, match=r"config.json exists: give another folder"):
        save_huggingface(folder, SMALL, tensors)
    with pytest.raises(ValueError, match=r"tensors have odd, which the model has not"):
        save_huggingface(tmp_path / "new", SMALL, tensors | {"odd": torch.ones(1)})
    with pytest.raises(ValueError, match=r"tensors: norm.weight is \[3\], in the model \[32\]"):
        save_huggingface(tmp_path / "new", SMALL, tensors | {"norm.weight": torch.ones(3)})
    del tensors["norm.weight"]
    with pytest.raises(ValueError, match=r"tensors lack norm.weight"):
        save_huggingface(tmp_path / "new", SMALL, tensors)


def test_every_serial_preset_that_llama_can_say_is_said_and_read_back() -> None:
    said = {name for name, preset in PRESETS.items() if preset.block == "serial" and preset.norm == "rms"}
    for name in said - {"llama-30b"}:  # its heads do not divide its width
        assert from_json(to_json(PRESETS[name])) == PRESETS[name]
    assert len(said) > 4


def job_of(folder: Path, **fields: Any) -> Path:
    data = make_set(folder.parent / "set", [9, 20, 5], vocab=50)
    loader = {"data": str(data), "tokens_per_step": 40, "capacity": 40}
    job = {"run": str(folder.parent / "run"), "steps": 1, "init": str(folder), "loader": loader, **fields}
    (folder.parent / "job.yaml").write_text(yaml.safe_dump(job))
    return folder.parent / "job.yaml"


def run(config: TrainConfig, said: list[object], steps: int) -> dict[str, Tensor]:
    """The weights at the start of a job, which then runs."""
    with Loader(loader_settings(config, 1), mode="inline") as loader:
        job = make_job(config, alone(torch.device("cpu")), loader, said.append)
        job.folder.mkdir(exist_ok=True)
        resume(job)
        weights = {name: parameter.detach().clone() for name, parameter in job.model.named_parameters()}
        run_job(job)
        assert job.step == steps
    return weights


def test_a_job_starts_from_weights_and_resumes_without_them(folder: Path) -> None:
    path = job_of(folder)
    config = load_config(path)
    assert config.model == SMALL
    said: list[object] = []
    weights = run(config, said, 1)
    assert all(torch.equal(weights[name], tensor) for name, tensor in Transformer(SMALL, seed=3).named_parameters())
    assert f"starts from {folder}" in said
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        load_config(path)  # what the model is, only the folder knew
    again = run(replace(config, steps=2), said, 2)
    assert not torch.equal(again["embedding.weight"], weights["embedding.weight"])


def test_the_model_section_must_agree_with_the_weights(folder: Path) -> None:
    path = job_of(folder, model={"rope_base": 5e5, "windows": [8], "layers": 2})
    assert load_config(path).model == replace(SMALL, rope_base=5e5, windows=(8,))
    with pytest.raises(ValueError, match=r"model.width is 64, that of .*model/config.json is 32: leave it out"):
        load_config(path, ["model.width=64"])
    with pytest.raises(ValueError, match=r"model.block is parallel, that of .* is serial"):
        load_config(path, ["model.block=parallel"])
    with pytest.raises(FileNotFoundError, match=r"nowhere/config.json is missing"):
        load_config(path, ["init=nowhere", "model={}"])
