"""What a transformer is made of: norms, attention, MLPs, and the two ways to put them together in a block.

The parallel block (PaLM; MegaScale) feeds attention and MLP from one norm and adds both to the residual at once, and
with them its only bias: what is added to a sum over tensor-parallel ranks must be added after it, once. The serial
block (GPT-2, Llama) adds attention, then the MLP of the sum. Modules are made without values, on torch's default
device; `transformer.init_weights` sets them.

Shapes: T packed rows, W width, H query heads, G key and value heads, D head width, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from seqmesh.kernels.activation import gelu, swiglu
from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout
from seqmesh.kernels.norm import layer_norm, rms_norm
from seqmesh.kernels.rotary import apply_rotary
from seqmesh.kernels.tensor_parallel import ALONE, Peers, gather_linear, sum_linear
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.experts import Experts
from seqmesh.trainer.models.linear import make_linear


def make_block(config: ModelConfig, window: int | None, peers: Peers = ALONE) -> ParallelBlock | SerialBlock:
    """The block of a layer with this window, divided over peers."""
    return (ParallelBlock if config.block == "parallel" else SerialBlock)(config, window, peers)


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
    """Causal attention with rotary positions and grouped key and value heads, to at most `window` keys. What `columns`
    make of rows [T, W] -> [T, heads · D], of which the block makes `output`. output_bias: whether that has a bias.
    attend: what is called for `varlen_attention`. Peers have some of the heads each."""

    def __init__(self, config: ModelConfig, window: int | None, peers: Peers, *, output_bias: bool) -> None:
        super().__init__()
        self.attend: Callable[..., Tensor] = varlen_attention
        self.head_dim = config.head_dim
        self.window = window
        width, kv_width = (heads * config.head_dim // peers.count for heads in (config.heads, config.kv_heads))
        bias = config.biases != "none"
        self.query = make_linear(config.width, width, bias=bias)
        self.key = make_linear(config.width, kv_width, bias=bias)
        self.value = make_linear(config.width, kv_width, bias=bias)
        self.output = make_linear(width, config.width, bias=output_bias)

    @property
    def columns(self) -> tuple[nn.Linear, ...]:
        return self.query, self.key, self.value

    def forward(self, qkv: Sequence[Tensor], cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        q, k, v = (each.view(len(each), -1, self.head_dim) for each in qkv)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return self.attend(q, k, v, layout, window=self.window).flatten(1)


class SwiGLU(nn.Module):
    """silu(gate) · up (Shazeer 2020), of which the block makes `down`. Twice [T, F] -> [T, F]. output_bias: whether
    `down` has one. Peers have some of F each."""

    def __init__(self, config: ModelConfig, peers: Peers, *, output_bias: bool) -> None:
        super().__init__()
        bias, inner = config.biases == "all", config.mlp_width // peers.count
        self.gate = make_linear(config.width, inner, bias=bias)
        self.up = make_linear(config.width, inner, bias=bias)
        self.down = make_linear(inner, config.width, bias=output_bias)

    @property
    def columns(self) -> tuple[nn.Linear, ...]:
        return self.gate, self.up

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)


class GELU(nn.Module):
    """gelu(up), the exact one, of which the block makes `down`. [T, F] -> [T, F]. output_bias: whether `down` has one.
    Peers have some of F each."""

    def __init__(self, config: ModelConfig, peers: Peers, *, output_bias: bool) -> None:
        super().__init__()
        inner = config.mlp_width // peers.count
        self.up = make_linear(config.width, inner, bias=config.biases == "all")
        self.down = make_linear(inner, config.width, bias=output_bias)

    @property
    def columns(self) -> tuple[nn.Linear, ...]:
        return (self.up,)

    def forward(self, up: Tensor) -> Tensor:
        return gelu(up)


Mlp = SwiGLU | GELU | Experts
"""Has `columns`, matrices that it is called with the results of, for all peers' rows."""


Branch = tuple[Tensor, nn.Linear | None]
"""[T, k], and a matrix that it goes through, of which peers have some columns each; or [T, W], a share of a sum over
peers, and None."""


def branch_of(mlp: Mlp, inner: Sequence[Tensor], layout: Layout) -> Branch:
    """Experts are called with the rows themselves, too, [T, W], and give a share of the sum."""
    if isinstance(mlp, Experts):
        return mlp(*inner, layout), None
    return mlp(*inner), mlp.down


def make_mlp(config: ModelConfig, peers: Peers, *, output_bias: bool) -> Mlp:
    if config.experts is not None:
        return Experts(config, peers)
    return (SwiGLU if config.activation == "swiglu" else GELU)(config, peers, output_bias=output_bias)


class ParallelBlock(nn.Module):
    """x + attention(n) + mlp(n) + bias, n = norm(x): one norm, one sum, one bias. [R, W] -> [R, W]."""

    def __init__(self, config: ModelConfig, window: int | None, peers: Peers) -> None:
        super().__init__()
        self.peers = peers
        self.norm = make_norm(config)
        self.attention = Attention(config, window, peers, output_bias=False)
        self.mlp = make_mlp(config, peers, output_bias=False)
        self.bias = nn.Parameter(torch.empty(config.width)) if config.biases == "all" else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        attention, mlp = self.attention, self.mlp
        columns = (*attention.columns, *mlp.columns)
        q, k, v, *inner = spread(self.norm(x), columns, self.peers, rows=isinstance(mlp, Experts))
        heads = attention((q, k, v), cos, sin, layout)
        branches = total([(heads, attention.output), branch_of(mlp, inner, layout)], self.peers)
        return x + (branches if self.bias is None else branches + self.bias)


class SerialBlock(nn.Module):
    """y + mlp(norm(y)), y = x + attention(norm(x)). [R, W] -> [R, W]."""

    def __init__(self, config: ModelConfig, window: int | None, peers: Peers) -> None:
        super().__init__()
        self.peers = peers
        bias = config.biases == "all"
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, window, peers, output_bias=bias)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config, peers, output_bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        attention, mlp = self.attention, self.mlp
        qkv = spread(self.attention_norm(x), attention.columns, self.peers)
        x = x + total([(attention(qkv, cos, sin, layout), attention.output)], self.peers)
        inner = spread(self.mlp_norm(x), mlp.columns, self.peers, rows=isinstance(mlp, Experts))
        return x + total([branch_of(mlp, inner, layout)], self.peers)


def spread(n: Tensor, columns: Sequence[nn.Linear], peers: Peers, *, rows: bool = False) -> list[Tensor]:
    """What matrices, of which peers have some rows each, make of all peers' rows, n [R, W] -> [T, ...] of each; and
    last, if wanted, these rows [T, W]."""
    if peers.count == 1:
        return [matrix(n) for matrix in columns] + [n] * rows
    return gather_linear(n, [(matrix.weight, matrix.bias) for matrix in columns], peers, rows=rows)


def total(branches: Sequence[Branch], peers: Peers) -> Tensor:
    """The sum of branches over peers, own rows [R, W] of it. Biases, which all peers have, are added once, at last."""
    if peers.count == 1:
        return reduce(add, [branch if matrix is None else matrix(branch) for branch, matrix in branches])
    partials = [branch for branch, matrix in branches if matrix is None]
    products = [(branch, matrix) for branch, matrix in branches if matrix is not None]
    out = sum_linear(
        [branch for branch, _ in products],
        [matrix.weight for _, matrix in products],
        peers,
        partial=reduce(add, partials) if partials else None,
    )
    return reduce(add, [matrix.bias for _, matrix in products if matrix.bias is not None], out)
