"""What a document costs to train on: fixed + linear · tokens + quadratic · attended (query, key) pairs.

Coefficients are integers in one unit of the job's choice, so that every machine that plans computes the same plan.
The quadratic term is attention: twice the tokens, four times the pairs. It overtakes the linear term at `crossover`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from seqmesh.packer.lengths import Int64Array, total
from seqmesh.packer.pieces import piece_pairs, piece_tokens

PAIR_UNITS = 64  # fixed point: a model's cost of one pair, so that the linear coefficient is good to 1/64 pair


def attended_pairs(lengths: Int64Array) -> Int64Array:
    """(query, key) pairs that causal attention computes in documents of these lengths: L · (L + 1) / 2, exact."""
    return lengths * (lengths + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """cost(L) = fixed + linear · L + quadratic · L · (L + 1) / 2, in integers. The default counts tokens alone."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    fixed: int = 0
    linear: int = 1
    quadratic: int = 0

    def __post_init__(self) -> None:
        for name in ("fixed", "linear", "quadratic"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: must not be negative")
        if self.fixed + self.linear + self.quadratic == 0:
            raise ValueError("fixed, linear and quadratic are all 0: a document must cost something")

    def of(self, lengths: Int64Array) -> Int64Array:
        """Cost of each document. Raises ValueError where the costs or their sum do not fit 62 bits."""
        longest = int(lengths.max()) if len(lengths) else 0
        dearest = self.fixed + self.linear * longest + self.quadratic * (longest * (longest + 1) // 2)
        if dearest > 1 << 62:  # Python's own integers: exact at any size
            raise ValueError(f"a document of {longest} tokens costs {dearest}, over 2**62: use a coarser unit")
        costs = self.fixed + self.linear * lengths + self.quadratic * attended_pairs(lengths)
        total(costs, "costs")
        return np.asarray(costs, np.int64)

    def of_pieces(self, lengths: Int64Array, ring_sizes: Int64Array, index: Int64Array) -> Int64Array:
        """Cost of piece `index` of each document, on its member of a ring; that of `of` for rings of one.

        Ring traffic is not counted: the members' compute hides it where the rings are as small as the capacity allows.
        """
        tokens, pairs = piece_tokens(lengths, ring_sizes, index), piece_pairs(lengths, ring_sizes, index)
        return np.asarray(self.fixed + self.linear * tokens + self.quadratic * pairs, np.int64)

    @property
    def crossover(self) -> float:
        """Length in tokens at which the quadratic term equals the linear one; infinite without a quadratic term."""
        return 2 * self.linear / self.quadratic - 1 if self.quadratic else float("inf")

    @classmethod
    def from_flops(cls, *, per_token: int, per_pair: int) -> CostModel:
        """A cost model in units of 1/64 of the work of one attended pair."""
        return cls(linear=max(1, round(per_token * PAIR_UNITS / per_pair)), quadratic=PAIR_UNITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer with gated (three-matrix) MLPs that decide its work."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    vocab_size: int

    @property
    def flops_per_token(self) -> int:
        """Matmul FLOPs of one token, forward and backward, without the attended pairs: 6 per weight (2 forward,
        4 backward). The embedding look-up is no matmul; the head is one."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)  # q and o, k and v
        return 6 * (self.layers * (attention + 3 * self.width * self.ffn_width) + self.width * self.vocab_size)

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one attended pair over all layers, forward and backward: q·k and p·v at 2 · head_width per head
        forward, twice that backward (the recomputation of scores that flash kernels do is not counted)."""
        return 12 * self.layers * self.heads * self.head_width

    def cost_model(self) -> CostModel:
        return CostModel.from_flops(per_token=self.flops_per_token, per_pair=self.flops_per_pair)


MODEL_8B = ModelShape(
    layers=32, width=4_096, heads=32, kv_heads=8, head_width=128, ffn_width=14_336, vocab_size=128_256
)
"""About 8 thousand million parameters: what plans and bins are compared with where no model is named."""
