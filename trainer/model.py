"""The model: a decoder-only transformer of parallel blocks over packed rows.

The parallel block (PaLM; MegaScale) feeds attention and MLP from one shared norm and adds both to the residual at
once: x + attention(n) + mlp(n), n = rms_norm(x). There are no biases. Rows of one pack see each other only inside the
segments of the layout; positions come with the batch. No optimizer, no process group here.

Shapes: T packed rows, W width, H query heads, G key and value heads, D head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from seqmesh.kernels.activation import swiglu
from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import linear_cross_entropy_sum
from seqmesh.kernels.norm import rms_norm
from seqmesh.kernels.rotary import apply_rotary, rotary_tables
from seqmesh.packer.cost import ModelShape

ModuleT = TypeVar("ModuleT", bound=nn.Module)

FFN_MULTIPLE = 64  # the default MLP width is a multiple of this


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the model. `kv_heads` must divide `heads`; width / heads is the head width and must be even."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn_width: int | None = None  # None: 8/3 of width, rounded up to a multiple of FFN_MULTIPLE
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tied_embeddings: bool = False  # True: the head is the embedding's transpose

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "ffn_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        for name in ("rope_base", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: must be positive and finite")
        if self.width % (2 * self.heads):
            raise ValueError(f"width is {self.width}: must be an even multiple of heads, {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: must divide heads, {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        """`ffn_width`, or the default: 8/3 of the width, at which SwiGLU has the parameters of a plain 4× MLP."""
        if self.ffn_width is not None:
            return self.ffn_width
        return -(-8 * self.width // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE

    @property
    def shape(self) -> ModelShape:
        """The sizes that decide the work of a token and of an attended pair."""
        return ModelShape(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.head_dim,
            ffn_width=self.mlp_width,
            vocab_size=self.vocab_size,
        )


class RMSNorm(nn.Module):
    """`rms_norm` with its weight [W]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key and value heads. [T, W] -> [T, W]. attend: what is called
    for `varlen_attention`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend: Callable[..., Tensor] = varlen_attention
        kv_width = config.kv_heads * config.head_dim
        self.query = _linear(config.width, config.width)
        self.key = _linear(config.width, kv_width)
        self.value = _linear(config.width, kv_width)
        self.output = _linear(config.width, config.width)

    def forward(self, n: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        q, k, v = (project(n).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value))
        attended = self.attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, layout)
        out: Tensor = self.output(attended.flatten(1))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(n)) · up(n)) (Shazeer 2020). [T, W] -> [T, W]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = _linear(config.width, config.mlp_width)
        self.up = _linear(config.width, config.mlp_width)
        self.down = _linear(config.mlp_width, config.width)

    def forward(self, n: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.gate(n), self.up(n)))
        return out


class ParallelBlock(nn.Module):
    """x + attention(n) + mlp(n), n = norm(x): one norm, one sum. [T, W] -> [T, W]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        n = self.norm(x)
        out: Tensor = x + (self.attention(n, cos, sin, layout) + self.mlp(n))
        return out


class Transformer(nn.Module):
    """Token ids to logits, or to their loss. The weights follow from `config` and `seed` alone: torch's global
    generator is not used."""

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = _unset(nn.Embedding(config.vocab_size, config.width, device="meta"))
        self.blocks = nn.ModuleList(ParallelBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied_embeddings else _linear(config.width, config.vocab_size)
        init_weights(self, seed)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, layout: Layout, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input_ids [T] int32 or int64, position_ids [T] inside the document, -> logits [T, V]; with labels [T] the sum
        of the loss and the number of supervised rows, as `linear_cross_entropy_sum` has them, and no logits are made.

        Rows after the layout's last segment are padding: they need valid ids and positions, attend to nothing, and
        touch no other row. T must be at least 1: a rank without documents does not call the model; ValueError
        otherwise, and for ids that are not [T].
        """
        if input_ids.ndim != 1 or len(input_ids) == 0 or position_ids.shape != input_ids.shape:
            shapes = f"input_ids {list(input_ids.shape)}, position_ids {list(position_ids.shape)}"
            raise ValueError(f"{shapes}: both must be [T] with T at least 1")
        x = self.embedding(input_ids)
        table_dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = rotary_tables(position_ids, self.config.head_dim, self.config.rope_base, table_dtype)
        for block in self.blocks:
            x = block(x, cos, sin, layout)
        n = self.norm(x)
        head = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(n, head) if labels is None else linear_cross_entropy_sum(n, head, labels)


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Set every weight from `seed`: norms to 1, the rest to normal numbers of standard deviation `init_std`.

    The matrices that write to the residual are drawn 1/sqrt(2 · layers) times smaller (GPT-2), so that the sum over
    2 · layers branches starts as wide as one. Drawn in float32 on the CPU, in the order of `named_parameters`: device
    and dtype of the model do not change the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    std = model.config.init_std
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
            continue
        to_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        scaled = std / math.sqrt(2 * model.config.layers) if to_residual else std
        weight.copy_(torch.randn(weight.shape, generator=generator) * scaled)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return _unset(nn.Linear(inputs, outputs, bias=False, device="meta"))


def _unset(module: ModuleT) -> ModuleT:
    """A module made on the meta device, moved to the default one with no values: torch's own would be thrown away."""
    return module.to_empty(device=torch.get_default_device())
