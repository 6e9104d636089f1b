"""What `seqmesh bench attention` attends over: packs of documents, and the least arithmetic that each needs.

A pack is the lengths of its documents and a dtype. FLOPs are those of the pairs that are attended to, counted exactly:
forward two products of every pair in every head, a multiplication and an addition each, backward two and a half times
as many. What a candidate computes beyond them, behind a mask, is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from seqmesh.benchmarks.lengths import SEED, first_tokens, published_documents, python_documents
from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import pairs_before

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [T, H, D] -> [T, H, D], causal inside each document of a pack."""

HEADS, WIDTH = 8, 64
BACKWARD = 2.5  # times the forward's arithmetic
K = 1 << 10
TAIL_MEDIAN, TAIL_SIGMA = 60, 1.42  # tokens; of a log-normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """lengths: of its documents, in order."""

    name: str
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def case(self) -> str:
        return f"{self.name}, {dtype_name(self.dtype)}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def flops(self, window: int | None = None, *, backward: bool) -> float:
        """Of one attention over it."""
        pairs = int(pairs_before(np.array(self.lengths, np.int64), window).sum())
        return 4.0 * HEADS * WIDTH * pairs * (1 + BACKWARD if backward else 1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tail_documents(tokens: int, *, seed: int = SEED) -> Int64Array:
    """Log-normal lengths, most of them short and a few that hold most of the pairs."""
    drawn = np.random.default_rng(seed).lognormal(np.log(TAIL_MEDIAN), TAIL_SIGMA, tokens)
    return first_tokens(np.maximum(drawn, 1).astype(np.int64), tokens)


def short_documents(tokens: int, documents: int) -> Int64Array:
    """So many documents, cut from `tokens` at places drawn evenly."""
    cuts = np.random.default_rng(SEED).choice(tokens - 1, documents - 1, replace=False) + 1
    return np.diff(np.sort(np.concatenate(([0], cuts, [tokens]))))


def packs(*, quick: bool) -> tuple[Pack, ...]:
    """The long tail, in both dtypes; short documents; and, but for `quick`, real documents, of which one of the Python
    files fills half of the pack."""
    long, short = (2 * K, K) if quick else (32 * K, 8 * K)
    tail = _pack("of a long tail", tail_documents(long, seed=29))
    found = (
        tail,
        replace(tail, dtype=torch.bfloat16),
        _pack("short", short_documents(short, 34 * short // K)),
    )
    if quick:
        return found
    articles = published_documents("wikipedia", 32 * K, 32 * K, seed=8)
    files = python_documents(16 * K, 16 * K, seed=29)
    return (*found, _pack("of Wikipedia", articles), _pack("Python files", files))


def _pack(kind: str, lengths: Int64Array) -> Pack:
    return Pack(name=f"{int(lengths.sum()) // K}K, {len(lengths)} {kind}", lengths=tuple(lengths.tolist()))


def layout_of(lengths: Sequence[int]) -> Layout:
    """Documents of these lengths, one after the other."""
    bounds = list(accumulate(lengths, initial=0))
    return Layout(torch.tensor(bounds, dtype=torch.int32), max(lengths))


def ours(lengths: Sequence[int], window: int | None = None) -> Attend:
    """The attention that is measured."""
    layout = layout_of(lengths)
    return lambda q, k, v: varlen_attention(q, k, v, layout, window=window)


def random_rows(tokens: int, dtype: torch.dtype, *, heads: int = HEADS, width: int = WIDTH) -> list[Tensor]:
    """q, k, v and the gradient of the output, [T, H, D] each, the same for the same arguments in every process; q, k
    and v collect gradients."""
    generator = torch.Generator().manual_seed(tokens)
    drawn = [torch.randn(tokens, heads, width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    return [x.requires_grad_() for x in drawn[:3]] + drawn[3:]


def forward(attend: Attend, rows: Sequence[Tensor]) -> Tensor:
    """Without anything kept for a backward pass."""
    with torch.no_grad():
        return attend(*rows[:3])


def forward_backward(attend: Attend, rows: Sequence[Tensor]) -> list[Tensor]:
    """Output, dq, dk, dv."""
    *qkv, dout = rows
    out = attend(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]
