"""Llama-style models as Hugging Face describes them: what a config.json says in our settings, what ours say in one, and
what weights are called there. Pure: no files, no tensors.

Known are the model types llama, mistral (one sliding window), mixtral (the same, with experts) and qwen2 (biases of
query, key and value; windows in some layers). They turn pairs (i, i + D/2) by rotary positions as `kernels.rotary`
does, so weights need no reordering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from seqmesh.kernels.rotary import RotaryScaling
from seqmesh.loader.explain import explain
from seqmesh.trainer.models.config import Biases, ModelConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
DECIDED = (  # by weights: what these are in a model can not be chosen when it starts from them
    *("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width"),
    *("block", "norm", "activation", "biases", "tied_embeddings", "experts"),
)

_ADAPTER = TypeAdapter(ModelConfig)
_ROOT = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "block_sparse_moe.gate",
}
_EXPERT = {"mlp.experts.gate": "w1", "mlp.experts.up": "w3", "mlp.experts.down": "w2"}


def their_names(name: str, experts: int | None) -> list[str]:
    """What a tensor of ours, of a model that `to_json` can say, is called in Llama's weights. A stack of experts'
    matrices is as many tensors there; biases of their choice are none."""
    module, _, leaf = name.rpartition(".")
    if not module.startswith("blocks."):
        return [f"{_ROOT[module]}.{leaf}"]
    _, layer, part = module.split(".", 2)
    if leaf == "balance":
        return []
    if part in _EXPERT:
        stack = f"model.layers.{layer}.block_sparse_moe.experts"
        return [f"{stack}.{number}.{_EXPERT[part]}.{leaf}" for number in range(experts or 0)]
    return [f"model.layers.{layer}.{_BLOCK[part]}.{leaf}"]


def from_json(data: Mapping[str, Any]) -> ModelConfig:
    """The settings of a config.json. What it leaves out is what transformers takes. Raises ValueError naming the field
    that is missing, or that this model can not do."""
    kind = data.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type is {kind!r}: must be one of {', '.join(ARCHITECTURES)}")
    _check_told(data, ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"))
    for name, expected in {"hidden_act": "silu", "quantization_config": None, "partial_rotary_factor": 1.0}.items():
        if data.get(name, expected) != expected:
            raise ValueError(f"{name} is {data[name]!r}: this model knows {expected!r} only")
    heads, own_width = data["num_attention_heads"], data.get("head_dim")
    if kind != "llama":
        _check_told(data, ("num_key_value_heads",))
    rope, mixtral = _rope(data), kind == "mixtral"
    fields = {
        "vocab_size": data["vocab_size"],
        "width": data["hidden_size"],
        "layers": data["num_hidden_layers"],
        "heads": heads,
        "kv_heads": data.get("num_key_value_heads") or heads,
        "head_width": None if own_width is None or own_width * heads == data["hidden_size"] else own_width,
        "ffn_width": data["intermediate_size"],
        "block": "serial",
        "windows": _windows(kind, data),
        "biases": _biases(kind, data),
        "rope_base": rope.get("rope_theta", data.get("rope_theta", 1e6 if mixtral else 1e4)),
        "rope_scaling": _scaling(rope, data),
        "norm_eps": data.get("rms_norm_eps", 1e-5 if mixtral else 1e-6),
        "init_std": data.get("initializer_range", 0.02),
        "tied_embeddings": data.get("tie_word_embeddings", False),
        "experts": _experts(data) if mixtral else None,
    }
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError as error:
        raise ValueError(f"is no model: {explain(error)}") from error


def to_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json that transformers of version 4 and 5 read, without dtype and special ids. Raises ValueError naming
    the setting that no Llama-style model can say."""
    for name, said in (("block", "serial"), ("norm", "rms"), ("activation", "swiglu")):
        if getattr(config, name) != said:
            raise ValueError(f"{name} is {getattr(config, name)}: Llama-style weights can only say {said}")
    if config.width % config.heads:
        raise ValueError(f"heads is {config.heads}: transformers wants it to divide width, {config.width}")
    kind, own = _kind(config)
    scaling = config.rope_scaling
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": config.rope_base,
        "rope_scaling": scaling and _scaling_json(scaling),
        **own,
    }


def check_agreement(config: ModelConfig, theirs: ModelConfig, place: str) -> None:
    """Raises ValueError where a model can not start from the weights of another at `place`: naming what differs."""
    for name in DECIDED:
        if (own := getattr(config, name)) != (other := getattr(theirs, name)):
            raise ValueError(f"model.{name} is {own}, that of {place} is {other}: leave it out, or make them agree")


def _check_told(data: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(data.get(name), int):
            raise ValueError(f"{name} is {data.get(name)!r}: must be a number")


def _experts(data: Mapping[str, Any]) -> Any:
    if data.get("num_experts_per_tok", 2) != 2:
        raise ValueError(f"num_experts_per_tok is {data['num_experts_per_tok']!r}: this model knows 2 only")
    return data.get("num_local_experts", 8)


def _biases(kind: str, data: Mapping[str, Any]) -> Biases:
    if kind == "qwen2":
        return "qkv"
    attention, mlp = (bool(data.get(name, False)) for name in ("attention_bias", "mlp_bias"))
    if kind == "llama" and attention != mlp:
        raise ValueError(f"attention_bias is {attention} and mlp_bias {mlp}: this model has both or none")
    return "all" if kind == "llama" and attention else "none"


def _windows(kind: str, data: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = data["num_hidden_layers"]
    if kind == "mistral":
        return (data.get("sliding_window", 4096),)
    if kind == "mixtral":
        return (data.get("sliding_window"),)
    if kind == "llama" or not data.get("use_sliding_window", False):
        return (None,)
    window, first = data.get("sliding_window", 4096), data.get("max_window_layers", 28)
    types = data.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(types, list):
        raise ValueError(f"layer_types is {types!r}: must be a list")
    if unknown := set(map(str, types)) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types has {', '.join(sorted(unknown))}: must be sliding_attention or full_attention")
    if len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} entries: num_hidden_layers is {layers}")
    return _shortest([window if each == "sliding_attention" else None for each in types])


def _shortest(windows: list[int | None]) -> tuple[int | None, ...]:
    """The pattern that repeats."""
    fits = (n for n in range(1, len(windows) + 1) if all(w == windows[i % n] for i, w in enumerate(windows)))
    return tuple(windows[: next(fits)])


def _rope(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of rotary positions; of version 5 of transformers the base, too."""
    name = "rope_parameters" if data.get("rope_parameters") else "rope_scaling"
    said = data.get(name) or {}
    if not isinstance(said, dict) or any(isinstance(value, dict) for value in said.values()):
        raise ValueError(f"{name} is {said!r}: must be one set of numbers for all layers")
    return said


def _scaling(said: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_scaling is of type {kind!r}: this model knows 'llama3' only")
    names = ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [name for name in names if name not in said]:
        raise ValueError(f"rope_scaling lacks {', '.join(missing)}")
    length = said.get("original_max_position_embeddings", data.get("max_position_embeddings"))
    if length is None:
        raise ValueError("rope_scaling lacks original_max_position_embeddings")
    return {name: said[name] for name in names} | {"original_length": length}


def _scaling_json(scaling: RotaryScaling) -> dict[str, Any]:
    said = asdict(scaling)
    return {"rope_type": "llama3", "original_max_position_embeddings": said.pop("original_length"), **said}


def _kind(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The model type that says biases and windows, and its own fields for them."""
    each = config.layer_windows
    sliding = {window for window in each if window is not None}
    if len(sliding) > 1:
        raise ValueError(f"windows is {list(config.windows)}: Llama-style weights can only say one window")
    if config.experts is not None and (config.biases != "none" or len(set(each)) > 1):
        raise ValueError(
            f"windows is {list(config.windows)} and biases {config.biases}: Llama-style weights with experts can only "
            "say one window, or none, in all layers, and no biases"
        )
    if config.experts is not None:
        return "mixtral", {"num_local_experts": config.experts, "num_experts_per_tok": 2, "sliding_window": each[0]}
    if config.biases == "qkv":
        types = ["full_attention" if window is None else "sliding_attention" for window in each]
        window = {"sliding_window": sliding.pop(), "max_window_layers": 0, "layer_types": types} if sliding else {}
        return "qwen2", {"use_sliding_window": bool(window), **window}
    if not sliding:
        bias = config.biases == "all"
        return "llama", {"attention_bias": bias, "mlp_bias": bias}
    if config.biases == "all" or None in each:
        raise ValueError(
            f"windows is {list(config.windows)} and biases {config.biases}: Llama-style weights can only say a window "
            "in all layers without biases, or in some with biases qkv"
        )
    return "mistral", {"sliding_window": sliding.pop()}
