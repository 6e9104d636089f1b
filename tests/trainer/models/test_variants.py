"""Every block, norm, activation, window and bias: the formulas written out, packed as alone, and first weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqmesh.kernels.loss import UNSUPERVISED, cross_entropy_sum
from seqmesh.kernels.rotary import RotaryScaling
from seqmesh.trainer.models.blocks import Attention
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer, parameter_shapes
from tests.kernels.reference import allowed_pairs, layout_of, positions_of, relative_error

CONFIG = ModelConfig(vocab_size=37, width=24, layers=3, heads=4, kv_heads=2, head_width=8, init_std=0.2)
SCALING = RotaryScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=30)
LENGTHS = [9, 1, 0, 23]
# All pairs of block and biases; norms, activations, windows and the rest change along with them.
CHANGES: tuple[dict[str, Any], ...] = (
    {"block": "parallel", "biases": "none", "norm": "layer", "activation": "gelu", "windows": (5, None)},
    {"block": "parallel", "biases": "qkv", "tied_embeddings": True, "rope_scaling": SCALING},
    {"block": "parallel", "biases": "all", "norm": "layer", "activation": "gelu", "windows": (4,), "ffn_width": 40},
    {"block": "serial", "biases": "none", "windows": (None, 3, 50), "rope_scaling": SCALING},
    {"block": "serial", "biases": "qkv", "norm": "layer", "activation": "gelu"},
    {"block": "serial", "biases": "all", "windows": (6,), "tied_embeddings": True},
)
VARIANTS = {"the default": replace(CONFIG, width=32, head_width=None)} | {
    f"{change['block']}, {change['biases']}": replace(CONFIG, **change) for change in CHANGES
}
VARIANTS |= {
    "parallel, experts": replace(CONFIG, experts=5, ffn_width=20),
    "serial, experts": replace(CONFIG, experts=2, block="serial", biases="qkv", activation="gelu"),
}


def model_of(config: ModelConfig) -> Transformer:
    """In float64, with biases and norms that are not 0 and 1, so that each of them shows."""
    model, generator = Transformer(config, seed=0).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def random_ids(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (rows,), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Transformer, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    logits: Tensor = model(ids, positions_of(lengths, len(ids) - sum(lengths)), layout_of(lengths))
    return logits


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_equals_the_formulas_written_out_document_by_document(name: str) -> None:
    """Logits and gradients against plain code that shares nothing with the model but its weights."""
    config = VARIANTS[name]
    model, ids, labels = model_of(config), random_ids(sum(LENGTHS) + 2), random_ids(sum(LENGTHS) + 2, seed=1)
    labels[sum(LENGTHS) :] = UNSUPERVISED
    total, count = model(ids, positions_of(LENGTHS, 2), layout_of(LENGTHS), labels)
    assert count == sum(LENGTHS)
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(weights.values()))
    documents = [ids[start:stop] for start, stop in ((0, 9), (9, 10), (10, 33))]
    expected = torch.cat([plain_logits(config, weights, document) for document in documents])
    assert relative_error(logits_of(model, ids, LENGTHS)[: sum(LENGTHS)], expected) <= 1e-12
    plain, _ = cross_entropy_sum(expected, labels[: sum(LENGTHS)])
    for key, got, wanted in zip(weights, gradients, torch.autograd.grad(plain, list(weights.values())), strict=True):
        # A key's bias moves all scores of a row alike where no position turns it: next to nothing is left of it.
        assert float((got - wanted).norm()) <= 1e-12 * max(1.0, float(wanted.norm())), key


def plain_logits(config: ModelConfig, w: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    x = w["embedding.weight"][ids]
    for layer in range(config.layers):
        prefix = f"blocks.{layer}."
        block = {name.removeprefix(prefix): p for name, p in w.items() if name.startswith(prefix)}
        window = config.windows[layer % len(config.windows)]
        if config.block == "parallel":
            n = plain_norm(config, block, "norm", x)
            x = x + plain_attention(config, block, n, window) + plain_mlp(config, block, n) + block.get("bias", 0)
        else:
            x = x + plain_attention(config, block, plain_norm(config, block, "attention_norm", x), window)
            x = x + plain_mlp(config, block, plain_norm(config, block, "mlp_norm", x))
    head = w["embedding.weight" if config.tied_embeddings else "head.weight"]
    return plain_norm(config, w, "norm", x) @ head.T


def plain_norm(config: ModelConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm == "layer":
        x = x - x.mean(dim=1, keepdim=True)
    return x / (x.pow(2).mean(dim=1, keepdim=True) + config.norm_eps).sqrt() * w[f"{name}.weight"] + w.get(
        f"{name}.bias", 0
    )


def plain_linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def plain_mlp(config: ModelConfig, w: Mapping[str, Tensor], n: Tensor) -> Tensor:
    if config.experts is None:
        return plain_inner(config, w, "mlp", n)
    probabilities = plain_linear(w, "mlp.router", n).softmax(dim=1)
    weights = probabilities * (probabilities >= probabilities.sort(dim=1).values[:, -2:-1])
    weights = weights / weights.sum(dim=1, keepdim=True)
    out = torch.zeros_like(n)
    for expert in range(config.experts):
        own = {name: stack[expert] for name, stack in w.items() if name.startswith("mlp.experts")}
        out = out + weights[:, expert : expert + 1] * plain_inner(config, own, "mlp.experts", n)
    return out


def plain_inner(config: ModelConfig, w: Mapping[str, Tensor], name: str, n: Tensor) -> Tensor:
    up = plain_linear(w, f"{name}.up", n)
    if config.activation == "gelu":
        return plain_linear(w, f"{name}.down", up * (1 + torch.erf(up / 2**0.5)) / 2)
    gate = plain_linear(w, f"{name}.gate", n)
    return plain_linear(w, f"{name}.down", gate * torch.sigmoid(gate) * up)


def plain_attention(config: ModelConfig, w: Mapping[str, Tensor], n: Tensor, window: int | None) -> Tensor:
    seen = allowed_pairs([len(n)], causal=True, window=window)
    q, k, v = (plain_linear(w, f"attention.{part}", n) for part in ("query", "key", "value"))
    heads = []
    for head in range(config.heads):
        group = head // (config.heads // config.kv_heads)
        own, shared = (slice(i * config.head_dim, (i + 1) * config.head_dim) for i in (head, group))
        scores = plain_turn(config, q[:, own]) @ plain_turn(config, k[:, shared]).T / config.head_dim**0.5
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(dim=1) @ v[:, shared])
    return plain_linear(w, "attention.output", torch.cat(heads, dim=1))


def plain_turn(config: ModelConfig, x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    frequencies = [config.rope_base ** (-i / half) for i in range(half)]
    if config.rope_scaling is not None:
        frequencies = [frequency * slowed(config.rope_scaling, frequency) for frequency in frequencies]
    angles = torch.outer(torch.arange(len(x), dtype=x.dtype), torch.tensor(frequencies, dtype=x.dtype))
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=1)


def slowed(scaling: RotaryScaling, frequency: float) -> float:
    """As Llama 3.1's own code has it."""
    wavelength = 2 * torch.pi / frequency
    if wavelength < scaling.original_length / scaling.high_freq_factor:
        return 1.0
    if wavelength > scaling.original_length / scaling.low_freq_factor:
        return 1 / scaling.factor
    smooth = scaling.original_length / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) / scaling.factor + smooth


@pytest.mark.parametrize("name", VARIANTS)
def test_linear_flops_are_what_torch_counts(name: str) -> None:
    config, rows = replace(VARIANTS[name], windows=(None,)), 5
    model = Transformer(config, seed=0)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(logits_of(model, random_ids(rows), [rows]).sum(), list(model.parameters()))
    counts = counter.get_flop_counts()["Global"]
    linear = sum(count for op, count in counts.items() if "attend" not in str(op) and "attention" not in str(op))
    assert linear == rows * config.shape.flops_per_token


def test_first_weights_of_every_kind() -> None:
    config = replace(CONFIG, block="serial", norm="layer", biases="all", width=128, layers=8, vocab_size=500, heads=16)
    for name, weight in Transformer(config, seed=0).state_dict().items():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert torch.equal(weight, torch.ones(128)), name
        else:
            expected = 0.05 if name.endswith(("output.weight", "down.weight")) else 0.2
            assert float(weight.std()) == pytest.approx(expected, rel=0.04), name


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_are_those_of_all_parameters_in_their_order(name: str) -> None:
    named = Transformer(VARIANTS[name], seed=0).named_parameters()
    assert list(parameter_shapes(VARIANTS[name]).items()) == [(key, weight.shape) for key, weight in named]


def test_a_parallel_block_has_one_bias_and_a_serial_one_two() -> None:
    def names(block: Any) -> list[str]:
        shapes = parameter_shapes(replace(CONFIG, layers=1, block=block, biases="all"))
        return [name.removeprefix("blocks.0.") for name in shapes if name.endswith("bias")]

    before = ["attention.query.bias", "attention.key.bias", "attention.value.bias"]
    assert names("parallel") == ["bias", *before, "mlp.gate.bias", "mlp.up.bias"]
    assert names("serial") == [*before, "attention.output.bias", "mlp.gate.bias", "mlp.up.bias", "mlp.down.bias"]


def test_windows_repeat_over_layers_and_are_the_shapes() -> None:
    config = replace(CONFIG, windows=(4, None))
    assert config.layer_windows == (4, None, 4)
    modules = Transformer(config, seed=0).modules()
    assert [module.window for module in modules if isinstance(module, Attention)] == [4, None, 4]
    assert config.shape.cost_model().windows == {4: 2, None: 1}
    assert (config.shape.mlp_matrices, replace(config, activation="gelu").shape.mlp_matrices) == (3, 2)
    assert replace(CONFIG, activation="gelu").mlp_width == 96


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_width": 7}, "head_width is 7: must be even"),
        ({"head_width": 0}, "head_width is 0: must be at least 1"),
        ({"windows": ()}, r"windows is \[\]: must have from 1 to layers, 3, entries"),
        ({"windows": (1, 2, 3, 4)}, r"windows is \[1, 2, 3, 4\]: must have from 1 to layers, 3, entries"),
        ({"windows": (None, 0)}, r"windows is \[None, 0\]: each must be at least 1"),
        ({"experts": 1}, "experts is 1: must be at least 2, as each token goes through two, or null"),
        ({"experts": 4, "biases": "all"}, "biases is all: experts have none, so with experts it must be none or qkv"),
        ({"balance_rate": -0.1}, "balance_rate is -0.1: must be at least 0 and finite"),
    ],
    ids=str,
)
def test_an_impossible_setting_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.0}, "factor is 0.0: must be positive"),
        ({"high_freq_factor": 1.0}, "high_freq_factor is 1.0: must be over low_freq_factor, 1.0"),
    ],
    ids=str,
)
def test_an_impossible_stretch_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SCALING, **change)
