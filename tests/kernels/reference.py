"""Slow, obvious attention to compare with: float64, a dense mask filled by plain loops. Differentiable by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from seqmesh.kernels.layout import Layout


def layout_of(lengths: Sequence[int], device: str = "cpu") -> Layout:
    """The layout of documents of these lengths, one after the other."""
    bounds = list(accumulate(lengths, initial=0))
    return Layout(torch.tensor(bounds, dtype=torch.int32, device=device), max(lengths, default=0))


def positions_of(lengths: Sequence[int], padding: int = 0) -> Tensor:
    """Positions inside each document, then zeros for the padding: [T] int32."""
    positions = [position for length in lengths for position in range(length)] + [0] * padding
    return torch.tensor(positions, dtype=torch.int32)


def allowed_pairs(lengths: Sequence[int], causal: bool) -> Tensor:
    """[R, R] bool, R the sum of the lengths: may row i see row j?"""
    rows = sum(lengths)
    allowed = torch.zeros(rows, rows, dtype=torch.bool)
    start = 0
    for length in lengths:
        for i in range(length):
            seen = i + 1 if causal else length
            allowed[start + i, start : start + seen] = True
        start += length
    return allowed


def reference_attention(qkv: Sequence[Tensor], lengths: Sequence[int], *, causal: bool, scale: float) -> Tensor:
    """q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D] in float64, rows after the documents 0."""
    q, k, v = qkv
    rows, padding = sum(lengths), len(q) - sum(lengths)
    allowed = allowed_pairs(lengths, causal)
    heads = []
    for head in range(q.shape[1]):
        key_head = head // (q.shape[1] // k.shape[1])
        query, key, value = (x[:rows, h].double() for x, h in ((q, head), (k, key_head), (v, key_head)))
        scores = (query @ key.T * scale).masked_fill(~allowed, -torch.inf)
        weights = (scores - scores.amax(dim=1, keepdim=True)).exp() if rows else scores
        heads.append(weights / weights.sum(dim=1, keepdim=True) @ value)
    out = torch.stack(heads, dim=1)
    return torch.cat((out, out.new_zeros(padding, *out.shape[1:])))


def leaves(*tensors: Tensor) -> list[Tensor]:
    """Float64 copies that collect gradients of their own."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest expected value where that exceeds 1."""
    if expected.numel() == 0:
        return 0.0
    largest = max(1.0, float(expected.detach().abs().max()))
    return float((got.detach().double() - expected.detach().double()).abs().max()) / largest
