"""Named models have the sizes that were published, and a job's file may begin with one."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from seqmesh.trainer.config import load_config, save_config
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.presets import PRESETS, with_preset
from seqmesh.trainer.models.transformer import Transformer, parameter_shapes
from tests.support import make_set

# As released, or as the sizes say that papers give: names are rounded, and ours has no learned positions.
PARAMETERS = {
    "tiny": 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384 + 128) + 2 * 4096 * 128 + 128,
    "125m": 12 * (4 * 768**2 + 3 * 768 * 2048 + 768) + 50_304 * 768 + 768,
    "1.3b": 24 * (4 * 2048**2 + 3 * 2048 * 5504 + 2048) + 50_304 * 2048 + 2048,
    "llama-7b": 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 11_008 + 2 * 4096) + 2 * 32_000 * 4096 + 4096,
    "llama-13b": 40 * (5120 * 5120 * 2 + 5120 * 1024 * 2 + 3 * 5120 * 13_824 + 2 * 5120) + 2 * 32_000 * 5120 + 5120,
    "llama-30b": 60 * (6656 * 7168 * 2 + 6656 * 1024 * 2 + 3 * 6656 * 17_920 + 2 * 6656) + 2 * 32_000 * 6656 + 6656,
    "llama-70b": 68_976_648_192,  # Llama 2 70B
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,  # with a vocabulary of 32,768
    "gpt3-175b": 96 * (12 * 12_288**2 + 13 * 12_288) + 50_257 * 12_288 + 2 * 12_288,
    "megascale-175b": 96 * (12 * 12_288**2 + 10 * 12_288) + 64_000 * 12_288 + 2 * 12_288,
}
ACTIVE = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39.1}  # thousand millions, as published, of each token
ABOUT = {"125m": 0.125, "1.3b": 1.3, "llama-13b": 13, "llama-30b": 30, "gpt3-175b": 175, "megascale-175b": 175}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_parameters(name: str) -> None:
    shapes = parameter_shapes(PRESETS[name])
    assert sum(math.prod(shape) for shape in shapes.values()) == PARAMETERS[name]
    if name in ABOUT:
        assert PARAMETERS[name] / 1e9 == pytest.approx(ABOUT[name], rel=0.13)
    matrices = sum(math.prod(s) for n, s in shapes.items() if len(s) == 2 and not n.startswith("embedding"))
    matrices += sum(2 * math.prod(s[1:]) for s in shapes.values() if len(s) == 3)  # two of a layer's experts
    vocabulary = PRESETS[name].vocab_size * PRESETS[name].width
    head = vocabulary if PRESETS[name].tied_embeddings else 0
    assert PRESETS[name].shape.flops_per_token == 6 * (matrices + head)
    if name in ACTIVE:
        assert (matrices + vocabulary) / 1e9 == pytest.approx(ACTIVE[name], rel=0.003)


def test_a_preset_on_the_meta_device_takes_no_memory() -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS["gpt3-175b"], seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_given_fields_override_a_preset() -> None:
    fields = with_preset({"preset": "llama-7b", "layers": 2, "rope_scaling": None})
    assert ModelConfig(**fields) == ModelConfig(**asdict(PRESETS["llama-7b"]) | {"layers": 2})
    assert with_preset({"layers": 2}) == {"layers": 2}


def test_a_job_may_name_a_preset_and_its_resolved_file_has_the_values(tmp_path: Path) -> None:
    loader = {"data": str(make_set(tmp_path, [5, 6])), "tokens_per_step": 100, "capacity": 50}
    job = {"run": "x", "steps": 1, "loader": loader, "model": {"preset": "tiny", "vocab_size": 50}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    config = load_config(tmp_path / "job.yaml", ["model.windows=[8, null]"])
    assert config.model == ModelConfig(vocab_size=50, width=128, layers=2, heads=4, kv_heads=2, windows=(8, None))
    save_config(config, tmp_path / "resolved.yaml")
    assert yaml.safe_load((tmp_path / "resolved.yaml").read_text())["model"]["width"] == 128
    assert load_config(tmp_path / "resolved.yaml") == config
    assert load_config(tmp_path / "job.yaml", ["model.preset=mistral-7b"]).model.windows == (4096,)
    with pytest.raises(ValueError, match=r"model.preset is 'big': must be one of tiny, "):
        load_config(tmp_path / "job.yaml", ["model.preset=big"])
    with pytest.raises(ValueError, match=r"model.windows.0: Input should be a valid integer"):
        load_config(tmp_path / "job.yaml", ["model.windows=[wide]"])
