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


def allowed_pairs(
    lengths: Sequence[int], causal: bool, window: int | None = None, key_lengths: Sequence[int] | None = None
) -> Tensor:
    """[rows, keys] bool, the sums of the lengths: may row i see key j? key_lengths: as many as rows unless given, the
    last key beside the last row. window: how many keys a row sees, itself included, and as many ahead if not causal."""
    key_lengths = lengths if key_lengths is None else key_lengths
    allowed = torch.zeros(sum(lengths), sum(key_lengths), dtype=torch.bool)
    first_row = first_key = 0
    for rows, keys in zip(lengths, key_lengths, strict=True):
        for row in range(rows):
            beside = row + keys - rows
            low = 0 if window is None else max(0, beside - window + 1)
            high = beside + 1 if causal else keys if window is None else beside + window
            if low < min(high, keys):
                allowed[first_row + row, first_key + low : first_key + min(high, keys)] = True
        first_row, first_key = first_row + rows, first_key + keys
    return allowed


def reference_attention(
    qkv: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    key_lengths: Sequence[int] | None = None,
) -> Tensor:
    """q [Tq, Hq, D], k and v [Tk, Hk, D] -> [Tq, Hq, D] in float64, 0 for rows after the documents or without keys."""
    return reference_block(
        qkv, lengths, lengths if key_lengths is None else key_lengths, causal=causal, window=window, scale=scale
    )[0]


def reference_block(
    qkv: Sequence[Tensor],
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same with the log-sum-exp [Hq, Tq] beside it, −inf where the output is 0 for want of keys."""
    q, k, v = qkv
    rows, keys, padding = sum(lengths), sum(key_lengths), len(q) - sum(lengths)
    allowed = allowed_pairs(lengths, causal, window, key_lengths)
    heads, sums = [], []
    for head in range(q.shape[1]):
        key_head = head // (q.shape[1] // k.shape[1])
        query, key, value = q[:rows, head].double(), k[:keys, key_head].double(), v[:keys, key_head].double()
        scores = (query @ key.T * scale).masked_fill(~allowed, -torch.inf)
        largest = torch.cat((scores.detach(), scores.new_full((rows, 1), -torch.inf)), dim=1).amax(dim=1, keepdim=True)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = (scores - largest).exp()
        total = weights.sum(dim=1, keepdim=True)
        heads.append(weights / total.masked_fill(total == 0, 1.0) @ value)
        sums.append((largest + total.detach().log()).squeeze(1))
    out, lse = torch.stack(heads, dim=1), torch.stack(sums)
    out = torch.cat((out, out.new_zeros(padding, *out.shape[1:])))
    return out, torch.cat((lse, lse.new_full((lse.shape[0], padding), -torch.inf)), dim=1)


def leaves(*tensors: Tensor) -> list[Tensor]:
    """Float64 copies that collect gradients of their own."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest expected value where that exceeds 1."""
    if expected.numel() == 0:
        return 0.0
    largest = max(1.0, float(expected.detach().abs().max()))
    return float((got.detach().double() - expected.detach().double()).abs().max()) / largest
