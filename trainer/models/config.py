"""What a model is: the settings that its shape, its arithmetic and its first weights follow from. No tensors here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, ClassVar, Literal

from seqmesh.kernels.rotary import RotaryScaling
from seqmesh.packer.cost import ModelShape

FFN_MULTIPLE = 64  # the default width of a gated MLP is a multiple of this

Biases = Literal["none", "qkv", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of the model; the defaults are MegaScale's parallel block with Llama's parts.

    kv_heads must divide heads. head_width: of one head, even; None: width / heads. ffn_width: of the MLP; None: see
    `mlp_width`. block: parallel, x + attention(n) + mlp(n) with n = norm(x); or serial, attention and then the MLP,
    each with a norm of its own. windows: the most tokens that one sees in each layer, itself included, None for all
    before it; layers beyond the last entry begin again at the first. experts: of every layer's MLP, of which each token
    goes through two, `ffn_width` being the width of one; None: one MLP for all. balance_rate: how far the bias of an
    expert's choice moves in a step, in units of probability. biases: of no matrix, of query, key and value
    (Qwen2), or of all but the head, and of layer norms. rope_scaling: of Llama 3.1. tied_embeddings: the head is the
    embedding's transpose.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int | None = None
    ffn_width: int | None = None
    block: Literal["parallel", "serial"] = "parallel"
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["swiglu", "gelu"] = "swiglu"
    windows: tuple[int | None, ...] = (None,)
    biases: Biases = "none"
    rope_base: float = 10_000.0
    rope_scaling: RotaryScaling | None = None
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tied_embeddings: bool = False
    experts: int | None = None
    balance_rate: float = 0.001

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "ffn_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        for name in ("rope_base", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: must be positive and finite")
        if self.head_width is None and self.width % (2 * self.heads):
            raise ValueError(
                f"width is {self.width}: must be an even multiple of heads, {self.heads}, or head_width be given"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_width is {self.head_width}: must be even")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: must divide heads, {self.heads}")
        self._check_windows()
        self._check_experts()

    def _check_windows(self) -> None:
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows is {list(self.windows)}: each must be at least 1, or null for all tokens before")
        if not 1 <= len(self.windows) <= self.layers:
            raise ValueError(f"windows is {list(self.windows)}: must have from 1 to layers, {self.layers}, entries")

    def _check_experts(self) -> None:
        if self.experts is not None and self.experts < 2:
            raise ValueError(f"experts is {self.experts}: must be at least 2, as each token goes through two, or null")
        if self.experts is not None and self.biases == "all":
            raise ValueError("biases is all: experts have none, so with experts it must be none or qkv")
        if not 0 <= self.balance_rate < math.inf:
            raise ValueError(f"balance_rate is {self.balance_rate}: must be at least 0 and finite")

    @property
    def head_dim(self) -> int:
        """Of one head: `head_width`, or width / heads."""
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def mlp_width(self) -> int:
        """`ffn_width`, or the default: 4 times the width, and for SwiGLU, whose third matrix gives it as many
        parameters at two thirds of that, 8/3 of the width rounded up to a multiple of FFN_MULTIPLE."""
        if self.ffn_width is not None:
            return self.ffn_width
        if self.activation == "gelu":
            return 4 * self.width
        return -(-8 * self.width // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of every layer."""
        return tuple(islice(cycle(self.windows), self.layers))

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
            mlp_matrices=3 if self.activation == "swiglu" else 2,
            windows=self.windows,
            experts=self.experts,
        )
