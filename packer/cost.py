"""What training on a piece of a document costs, in integers, so that every machine that plans computes the same plan.

A micro-batch takes `fixed` + linear · tokens + max(attention, traffic): attention is quadratic · attended (query, key)
pairs, traffic is what the rows of keys and values that its rings bring in take on the way. All rings and whole
documents of a micro-batch are one attention, so that any of its compute hides any of its traffic; what is left of the
traffic is exposed. The quadratic term is attention: twice the tokens, four times the pairs. It overtakes the linear
term at `crossover`. Coefficients are in one unit of the job's choice, from a model's shape and a machine (`ModelShape`,
`Machine`) or fitted to timings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from seqmesh.packer.lengths import LARGEST, Int64Array
from seqmesh.packer.pieces import pairs_before, piece_pairs, piece_rows, piece_tokens
from seqmesh.packer.totals import total

PAIR_UNITS = 64  # fixed point: a model's cost of one pair, so that the other coefficients are good to 1/64 pair


def attended_pairs(lengths: Int64Array) -> Int64Array:
    """(query, key) pairs that causal attention computes in documents of these lengths: L · (L + 1) / 2, exact."""
    return lengths * (lengths + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """fixed: of a micro-batch. linear: of a token. quadratic: of an attended pair. row_near, row_far: of one row of
    keys and values that comes from a rank of the same node, or of another one. window: the most keys that a query sees,
    None for all before it. The default counts tokens alone."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    fixed: int = 0
    linear: int = 1
    quadratic: int = 0
    row_near: int = 0
    row_far: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("fixed", "linear", "quadratic", "row_near", "row_far"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: must not be negative")
        if self.linear + self.quadratic == 0:
            raise ValueError("linear and quadratic are both 0: a document must cost something")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: must be at least 1, or none")

    def of(self, lengths: Int64Array) -> Int64Array:
        """Cost of each document alone on a rank, without the micro-batch's fixed cost. Raises ValueError where the
        costs or their sum do not fit 62 bits."""
        longest = int(lengths.max()) if len(lengths) else 0
        inside = longest if self.window is None else min(self.window, longest)
        pairs = inside * (inside + 1) // 2 + (longest - inside) * inside
        dearest = longest * (self.linear + max(self.row_near, self.row_far)) + self.quadratic * pairs
        if dearest > LARGEST:  # Python's own integers: exact at any size
            raise ValueError(f"a document of {longest} tokens costs up to {dearest}, over 2**62: use a coarser unit")
        costs = self.linear * lengths + self.quadratic * pairs_before(lengths, self.window)
        everything = total(costs, "costs") + int(lengths.sum()) * max(self.row_near, self.row_far)
        if everything > LARGEST:  # what one rank may come to, with the traffic of all rings
            raise ValueError(f"costs and traffic come to {everything}, over 2**62: use a coarser unit")
        return np.asarray(costs, np.int64)

    def attention(self, lengths: Int64Array, ring_sizes: Int64Array, index: Int64Array) -> Int64Array:
        """Attention's share of the cost of piece `index` of each document."""
        return np.asarray(self.quadratic * piece_pairs(lengths, ring_sizes, index, self.window), np.int64)

    def of_pieces(self, lengths: Int64Array, ring_sizes: Int64Array, index: Int64Array) -> Int64Array:
        """Compute of piece `index` of each document, on its member of a ring; that of `of` for rings of one."""
        tokens = piece_tokens(lengths, ring_sizes, index)
        return np.asarray(self.linear * tokens + self.attention(lengths, ring_sizes, index), np.int64)

    def traffic(self, lengths: Int64Array, ring_sizes: Int64Array, index: Int64Array, far: Int64Array) -> Int64Array:
        """What the rows that each piece's rank receives take on the way. far: whether (1 or 0) its ring leaves a node:
        then all of it is counted at the slower rate, as one slow link holds up the whole ring."""
        rows = piece_rows(lengths, ring_sizes, index, self.window)
        return np.asarray(rows * np.where(far, self.row_far, self.row_near), np.int64)

    def alone(self, lengths: Int64Array, ring_sizes: Int64Array, index: Int64Array, per_node: int) -> Int64Array:
        """What piece `index` of each document takes where its micro-batch holds nothing else, without the fixed cost:
        its traffic is hidden by nothing but its own attention. Rings leave a node where they are over `per_node`."""
        attention = self.attention(lengths, ring_sizes, index)
        traffic = self.traffic(lengths, ring_sizes, index, (ring_sizes > per_node).astype(np.int64))
        tokens = piece_tokens(lengths, ring_sizes, index)
        return np.asarray(self.linear * tokens + np.maximum(attention, traffic), np.int64)

    @property
    def crossover(self) -> float:
        """Length in tokens at which the quadratic term equals the linear one; infinite without a quadratic term, or
        where the window keeps it smaller."""
        if not self.quadratic:
            return float("inf")
        length = max(2 * self.linear / self.quadratic - 1, 0.0)
        if self.window is None or length <= self.window:
            return length
        excess = self.quadratic * self.window - self.linear  # beyond the window each token sees `window` keys
        inside = self.quadratic * self.window * (self.window - 1) / 2
        return inside / excess if excess > 0 else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a rank computes and how its links go. flops: matmul FLOPs per second that are reached, not those of the data
    sheet. near, far: bytes per second into one rank from ranks of its node, and of other nodes. launch: seconds that a
    micro-batch takes whatever is in it."""

    flops: float
    near: float
    far: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "near", "far"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}: must be a positive number")
        if not 0 <= self.launch < float("inf"):
            raise ValueError(f"launch is {self.launch}: must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer with gated (three-matrix) MLPs that decide its work. window: see
    `CostModel`. number_bytes: of one number of a key or value on the way; gradients travel in four."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    vocab_size: int
    window: int | None = None
    number_bytes: int = 2

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

    @property
    def bytes_per_row(self) -> int:
        """Bytes that one row of keys and values brings to a rank that sees it: in each layer forward, again backward,
        and its gradient's way back."""
        return self.layers * 2 * self.kv_heads * self.head_width * (2 * self.number_bytes + 4)

    def cost_model(self, machine: Machine | None = None) -> CostModel:
        """In units of 1/64 of the work of one attended pair. Without a machine links and launches count nothing."""
        per_flop = PAIR_UNITS / self.flops_per_pair
        compute = {"linear": max(1, round(self.flops_per_token * per_flop)), "quadratic": PAIR_UNITS}
        if machine is None:
            return CostModel(**compute, window=self.window)
        per_second = machine.flops * per_flop
        return CostModel(
            **compute,
            fixed=round(machine.launch * per_second),
            row_near=round(self.bytes_per_row / machine.near * per_second),
            row_far=round(self.bytes_per_row / machine.far * per_second),
            window=self.window,
        )


MODEL_8B = ModelShape(
    layers=32, width=4_096, heads=32, kv_heads=8, head_width=128, ffn_width=14_336, vocab_size=128_256
)
"""About 8 thousand million parameters: what plans and bins are compared with where no model is named."""
