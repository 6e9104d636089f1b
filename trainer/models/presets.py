"""Models by name, and the model section of a job's file from a name and what is changed of it.

Shapes are the published ones. What papers leave open, or what this model does in its own way (rotary positions in place
of learned ones), is as in `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from seqmesh.kernels.rotary import RotaryScaling
from seqmesh.trainer.models.config import ModelConfig

_llama = partial(ModelConfig, vocab_size=32_000, block="serial")
_gpt3 = partial(ModelConfig, block="serial", norm="layer", activation="gelu", biases="all")

PRESETS: dict[str, ModelConfig] = {
    # The house's own: parallel blocks, about as deep and wide as GPT-3's of these sizes (Brown et al. 2020).
    "tiny": ModelConfig(vocab_size=4096, width=128, layers=2, heads=4, kv_heads=2),
    "125m": ModelConfig(vocab_size=50_304, width=768, layers=12, heads=12, kv_heads=12, tied_embeddings=True),
    "1.3b": ModelConfig(vocab_size=50_304, width=2048, layers=24, heads=16, kv_heads=16, tied_embeddings=True),
    # Llama with 8 key and value heads in every size, as ByteScale trains it (Ge et al. 2025, table of models).
    "llama-7b": _llama(width=4096, layers=32, heads=32, kv_heads=8, ffn_width=11_008),
    "llama-13b": _llama(width=5120, layers=40, heads=40, kv_heads=8, ffn_width=13_824),
    "llama-30b": _llama(width=6656, layers=60, heads=56, kv_heads=8, head_width=128, ffn_width=17_920),
    "llama-70b": _llama(width=8192, layers=80, heads=64, kv_heads=8, ffn_width=28_672),
    # As released.
    "llama-3.1-8b": _llama(
        vocab_size=128_256,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        ffn_width=14_336,
        rope_base=500_000.0,
        rope_scaling=RotaryScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192),
    ),
    "mistral-7b": _llama(width=4096, layers=32, heads=32, kv_heads=8, ffn_width=14_336, windows=(4096,)),
    "mixtral-8x7b": _llama(
        width=4096, layers=32, heads=32, kv_heads=8, ffn_width=14_336, experts=8, rope_base=1_000_000.0
    ),
    "mixtral-8x22b": _llama(
        vocab_size=32_768,
        width=6144,
        layers=56,
        heads=48,
        kv_heads=8,
        ffn_width=16_384,
        experts=8,
        rope_base=1_000_000.0,
    ),
    "gpt3-175b": _gpt3(vocab_size=50_257, width=12_288, layers=96, heads=96, kv_heads=96, tied_embeddings=True),
    "megascale-175b": _gpt3(
        vocab_size=64_000,
        width=12_288,
        layers=96,
        heads=128,
        kv_heads=128,
        block="parallel",
        tied_embeddings=True,
    ),
}


def with_preset(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ModelConfig`, where `preset` names a model: its values, but for those that are given beside it.

    Raises ValueError for an unknown name.
    """
    given = dict(fields)
    name = given.pop("preset", None)
    if name is None:
        return given
    if name not in PRESETS:
        raise ValueError(f"model.preset is {name!r}: must be one of {', '.join(PRESETS)}")
    return asdict(PRESETS[name]) | given
