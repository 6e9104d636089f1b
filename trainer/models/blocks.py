"""What a transformer is made of: norms, attention, MLPs, and the two ways to put them together in a block.

The parallel block (PaLM; MegaScale) feeds attention and MLP from one norm and adds both to the residual at once, and
with them its only bias: what is added to a sum over tensor-parallel ranks must be added after it, once. The serial
block (GPT-2, Llama) adds attention, then the MLP of the sum. Modules are made without values, on torch's default
device; `transformer.init_weights` sets them.

Shapes: T packed rows, W width, H query heads, G key and value heads, D head width, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from seqmesh.kernels.activation import gelu, swiglu
from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout
from seqmesh.kernels.norm import layer_norm, rms_norm
from seqmesh.kernels.rotary import apply_rotary
from seqmesh.trainer.models.config import ModelConfig

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def make_block(config: ModelConfig, window: int | None) -> ParallelBlock | SerialBlock:
    """The block of a layer with this window."""
    return (ParallelBlock if config.block == "parallel" else SerialBlock)(config, window)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight [W]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """`layer_norm` with its weight [W] and, if wanted, bias [W]."""

    def __init__(self, width: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps)
    return LayerNorm(config.width, config.norm_eps, bias=config.biases == "all")


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key and value heads, to at most `window` keys. [T, W] -> [T,
    W]. output_bias: whether the result has one. attend: what is called for `varlen_attention`."""

    def __init__(self, config: ModelConfig, window: int | None, *, output_bias: bool) -> None:
        super().__init__()
        self.attend: Callable[..., Tensor] = varlen_attention
        self.head_dim = config.head_dim
        self.window = window
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.biases != "none"
        self.query = make_linear(config.width, width, bias=bias)
        self.key = make_linear(config.width, kv_width, bias=bias)
        self.value = make_linear(config.width, kv_width, bias=bias)
        self.output = make_linear(width, config.width, bias=output_bias)

    def forward(self, n: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        q, k, v = (project(n).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        attended = self.attend(q, k, v, layout, window=self.window)
        out: Tensor = self.output(attended.flatten(1))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(n)) · up(n)) (Shazeer 2020). [T, W] -> [T, W]. output_bias: whether the result has one."""

    def __init__(self, config: ModelConfig, *, output_bias: bool) -> None:
        super().__init__()
        bias = config.biases == "all"
        self.gate = make_linear(config.width, config.mlp_width, bias=bias)
        self.up = make_linear(config.width, config.mlp_width, bias=bias)
        self.down = make_linear(config.mlp_width, config.width, bias=output_bias)

    def forward(self, n: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.gate(n), self.up(n)))
        return out


class GELU(nn.Module):
    """down(gelu(up(n))), the exact GELU. [T, W] -> [T, W]. output_bias: whether the result has one."""

    def __init__(self, config: ModelConfig, *, output_bias: bool) -> None:
        super().__init__()
        self.up = make_linear(config.width, config.mlp_width, bias=config.biases == "all")
        self.down = make_linear(config.mlp_width, config.width, bias=output_bias)

    def forward(self, n: Tensor) -> Tensor:
        out: Tensor = self.down(gelu(self.up(n)))
        return out


def make_mlp(config: ModelConfig, *, output_bias: bool) -> SwiGLU | GELU:
    return (SwiGLU if config.activation == "swiglu" else GELU)(config, output_bias=output_bias)


class ParallelBlock(nn.Module):
    """x + attention(n) + mlp(n) + bias, n = norm(x): one norm, one sum, one bias. [T, W] -> [T, W]."""

    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.attention = Attention(config, window, output_bias=False)
        self.mlp = make_mlp(config, output_bias=False)
        self.bias = nn.Parameter(torch.empty(config.width)) if config.biases == "all" else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        n = self.norm(x)
        branches: Tensor = self.attention(n, cos, sin, layout) + self.mlp(n)
        return x + (branches if self.bias is None else branches + self.bias)


class SerialBlock(nn.Module):
    """y + mlp(norm(y)), y = x + attention(norm(x)). [T, W] -> [T, W]."""

    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        bias = config.biases == "all"
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, window, output_bias=bias)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config, output_bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, layout)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def make_linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    return unset(nn.Linear(inputs, outputs, bias=bias, device="meta"))


def unset(module: ModuleT) -> ModuleT:
    """A module made on the meta device, moved to the default one with no values: torch's own would be thrown away."""
    return module.to_empty(device=torch.get_default_device())
