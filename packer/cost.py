"""What training on a piece of a document costs, in integers, so that every machine that plans computes the same plan.

A micro-batch takes `fixed` + linear · tokens + max(attention, traffic): attention is quadratic · attended (query, key)
pairs, traffic is what the rows of keys and values that its rings bring in take on the way. All rings and whole
documents of a micro-batch are one attention, so that any of its compute hides any of its traffic; what is left of the
traffic is exposed. The quadratic term is attention: twice the tokens, four times the pairs. It overtakes the linear
term at `crossover`. Coefficients are in one unit of the job's choice, from a model's shape and a machine (`ModelShape`,
`Machine`) or fitted to timings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
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
    None for all before it. other_windows: the same of further layers, where layers differ: a pair and a row count once
    for each layer, of this one and of those, that sees them. The default counts tokens alone."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    fixed: int = 0
    linear: int = 1
    quadratic: int = 0
    row_near: int = 0
    row_far: int = 0
    window: int | None = None
    other_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("fixed", "linear", "quadratic", "row_near", "row_far"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: must not be negative")
        if self.linear + self.quadratic == 0:
            raise ValueError("linear and quadratic are both 0: a document must cost something")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: must be at least 1, or none")
        if any(window is not None and window < 1 for window in self.other_windows):
            raise ValueError(f"other_windows is {list(self.other_windows)}: each must be at least 1, or none")

    @property
    def windows(self) -> Counter[int | None]:
        """How many of the layers that a pair counts for have each window."""
        return Counter((self.window, *self.other_windows))

    def through(self, windows: Sequence[int | None]) -> CostModel:
        """The costs of a model whose layers have these windows, in equal shares, from those of one without, in a unit
        as many times finer. Raises ValueError for costs that know of windows already."""
        if self.windows != {None: 1}:
            raise ValueError(f"windows are {list(self.windows.elements())}: there must be none yet")
        shares, (window, *others) = len(windows), windows
        fixed, linear = self.fixed * shares, self.linear * shares
        return replace(self, fixed=fixed, linear=linear, window=window, other_windows=tuple(others))

    def of(self, lengths: Int64Array) -> Int64Array:
        """Cost of each document alone on a rank, without the micro-batch's fixed cost. Raises ValueError where the
        costs or their sum do not fit 62 bits."""
        longest = int(lengths.max()) if len(lengths) else 0
        row = max(self.row_near, self.row_far) * self.windows.total()
        pairs = 0
        for window, layers in self.windows.items():
            inside = longest if window is None else min(window, longest)
            pairs += layers * (inside * (inside + 1) // 2 + (longest - inside) * inside)
        dearest = longest * (self.linear + row) + self.quadratic * pairs
        if dearest > LARGEST:  # Python's own integers: exact at any size
            raise ValueError(f"a document of {longest} tokens costs up to {dearest}, over 2**62: use a coarser unit")
        seen = sum(layers * pairs_before(lengths, window) for window, layers in self.windows.items())
        costs = self.linear * lengths + self.quadratic * seen
        everything = total(costs, "costs") + int(lengths.sum()) * row
        if everything > LARGEST:  # what one rank may come to, with the traffic of all rings
            raise ValueError(f"costs and traffic come to {everything}, over 2**62: use a coarser unit")
        return np.asarray(costs, np.int64)

    def attention(self, lengths: Int64Array, ring_sizes: Int64Array, index: Int64Array) -> Int64Array:
        """Attention's share of the cost of piece `index` of each document."""
        pairs = (layers * piece_pairs(lengths, ring_sizes, index, window) for window, layers in self.windows.items())
        return np.asarray(self.quadratic * sum(pairs), np.int64)

    def of_pieces(self, lengths: Int64Array, ring_sizes: Int64Array, index: Int64Array) -> Int64Array:
        """Compute of piece `index` of each document, on its member of a ring; that of `of` for rings of one."""
        tokens = piece_tokens(lengths, ring_sizes, index)
        return np.asarray(self.linear * tokens + self.attention(lengths, ring_sizes, index), np.int64)

    def traffic(self, lengths: Int64Array, ring_sizes: Int64Array, index: Int64Array, far: Int64Array) -> Int64Array:
        """What the rows that each piece's rank receives take on the way. far: whether (1 or 0) its ring leaves a node:
        then all of it is counted at the slower rate, as one slow link holds up the whole ring."""
        rows = sum(layers * piece_rows(lengths, ring_sizes, index, w) for w, layers in self.windows.items())
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
        layers = self.windows.total()
        limits = sorted(window for window in self.windows.elements() if window is not None)
        for bound, limit in enumerate(limits):  # the windows before it are shorter than the length
            if (length := self._crossing(layers - bound, limits[:bound])) <= limit:
                return length
        return self._crossing(layers - len(limits), limits)

    def _crossing(self, unbound: int, bound: list[int]) -> float:
        """Where quadratic · (unbound · L (L + 1) / 2 + Σ (w · L − w (w − 1) / 2)) is linear · L."""
        square = self.quadratic * unbound / 2
        slope = square + self.quadratic * sum(bound) - self.linear
        missing = self.quadratic * sum(window * (window - 1) for window in bound) / 2
        root = math.sqrt(slope**2 + 4 * square * missing)
        if slope > 0:
            return 2 * missing / (slope + root)
        return (root - slope) / (2 * square) if square else float("inf")


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
    """The sizes of a decoder-only transformer that decide its work. mlp_matrices: of an MLP, 3 where it is gated, else
    2. windows: the most keys that a query sees, None for all before it, of one layer after the other and again from the
    first. experts: MLPs of a layer, of which each token goes through two; None: one, for all tokens. number_bytes: of
    one number of a key or value on the way; gradients travel in four."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    vocab_size: int
    mlp_matrices: int = 3
    windows: tuple[int | None, ...] = (None,)
    experts: int | None = None
    number_bytes: int = 2

    @property
    def flops_per_token(self) -> int:
        """Matmul FLOPs of one token, forward and backward, without the attended pairs: 6 per weight (2 forward,
        4 backward). The embedding look-up is no matmul; the head is one."""
        return 6 * (self.layers * self.layer_weights + self.width * self.vocab_size)

    @property
    def layer_weights(self) -> int:
        """Of a layer's matrices, those that one token is multiplied by."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)  # q and o, k and v
        mlp = self.mlp_matrices * self.width * self.ffn_width
        return attention + (mlp if self.experts is None else 2 * mlp + self.width * self.experts)

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one pair that all layers attend to, forward and backward: q·k and p·v at 2 · head_width per head
        forward, twice that backward (the recomputation of scores that flash kernels do is not counted)."""
        return 12 * self.layers * self.heads * self.head_width

    @property
    def layers_by_window(self) -> Counter[int | None]:
        """How many layers have each window."""
        return Counter(islice(cycle(self.windows), self.layers))

    def flops(self, lengths: Int64Array) -> int:
        """Matmul FLOPs of whole documents, forward and backward, of the pairs that each layer's window leaves."""
        pairs = (n * int(pairs_before(lengths, window).sum()) for window, n in self.layers_by_window.items())
        return int(lengths.sum()) * self.flops_per_token + self.flops_per_pair // self.layers * sum(pairs)

    @property
    def bytes_per_row(self) -> int:
        """Bytes that one row of keys and values brings to a rank that sees it: in each layer forward, again backward,
        and its gradient's way back."""
        return self.layers * 2 * self.kv_heads * self.head_width * (2 * self.number_bytes + 4)

    def cost_model(self, machine: Machine | None = None) -> CostModel:
        """In units of about 1/64 of the work of one pair that all layers attend to, exactly so where one window serves
        all. Without a machine links and launches count nothing."""
        window, *others = self.window_shares
        shares = 1 + len(others)
        per_flop = 1 / self.unit_flops
        pair = round(self.flops_per_pair / shares * per_flop)
        linear = max(1, round(self.flops_per_token * per_flop))
        alike = CostModel(linear=linear, quadratic=pair, window=window, other_windows=tuple(others))
        if machine is None:
            return alike
        per_second = machine.flops * per_flop
        return replace(
            alike,
            fixed=round(machine.launch * per_second),
            row_near=round(self.bytes_per_row / shares / machine.near * per_second),
            row_far=round(self.bytes_per_row / shares / machine.far * per_second),
        )

    @property
    def unit_flops(self) -> float:
        """FLOPs of one unit of `cost_model`."""
        shares = len(self.window_shares)
        return self.flops_per_pair / (shares * max(1, PAIR_UNITS // shares))

    @property
    def window_shares(self) -> list[int | None]:
        """The windows of the fewest layers that stand for all in their proportion, the shortest first."""
        counts = self.layers_by_window
        alike = math.gcd(*counts.values())
        return sorted((w for w, n in counts.items() for _ in range(n // alike)), key=lambda w: (w is None, w or 0))


MODEL_8B = ModelShape(
    layers=32, width=4_096, heads=32, kv_heads=8, head_width=128, ffn_width=14_336, vocab_size=128_256
)
"""About 8 thousand million parameters: what plans and bins are compared with where no model is named."""
