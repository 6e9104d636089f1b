"""Attention as its formula reads, in float64 over a dense mask: to compare with, and to fall back on by name.

Slow, and quadratic in memory inside a segment; on any device and dtype, whatever the request.

Shapes: Lq queries and Lk keys of one segment, Hq query heads, Hk key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments, statistics_dtype


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
    """See `base.BlockForward`."""
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=statistics_dtype(q.dtype))
    for queries, keys in row_ranges(segments):
        scores = _scores(q[queries], k[keys], rule)
        row_lse = torch.logsumexp(scores, dim=-1)
        weights = _weights(scores, row_lse)
        value = _expand(v[keys], q.shape[1])
        out[queries] = (weights @ value).transpose(0, 1).to(out.dtype)
        lse[:, queries] = row_lse.to(lse.dtype)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `base.BlockBackward`."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in row_ranges(segments):
        weights = _weights(_scores(q[queries], k[keys], rule), lse[:, queries].double())
        grad, output = (x[queries].double().transpose(0, 1) for x in (dout, out))
        dweights = grad @ _expand(v[keys], q.shape[1]).transpose(1, 2)
        dscores = weights * (dweights - (grad * output).sum(dim=-1, keepdim=True)) * rule.scale
        dq[queries] = (dscores @ _expand(k[keys], q.shape[1])).transpose(0, 1).to(dq.dtype)
        query = q[queries].double().transpose(0, 1)
        dk[keys] = _gather_heads(dscores.transpose(1, 2) @ query, k.shape[1]).to(dk.dtype)
        dv[keys] = _gather_heads(weights.transpose(1, 2) @ grad, v.shape[1]).to(dv.dtype)
    return dq, dk, dv


def row_ranges(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """(query rows, key rows) of the segments that have both."""
    query_bounds, key_bounds = (pairwise(cu.tolist()) for cu in (segments.cu_q, segments.cu_k))
    for (q_start, q_stop), (k_start, k_stop) in zip(query_bounds, key_bounds, strict=True):
        if q_start < q_stop and k_start < k_stop:
            yield slice(q_start, q_stop), slice(k_start, k_stop)


def visible(queries: int, keys: int, rule: Rule, device: torch.device | None = None) -> Tensor:
    """[queries, keys] bool: which key each row sees, the last query standing beside the last key."""
    position = torch.arange(queries, device=device).unsqueeze(1) + keys - queries
    distance = position - torch.arange(keys, device=device)
    allowed = distance >= 0 if rule.causal else torch.ones_like(distance, dtype=torch.bool)
    return allowed if rule.window is None else allowed & (distance.abs() < rule.window)


def _scores(q: Tensor, k: Tensor, rule: Rule) -> Tensor:
    """[Hq, Lq, Lk] float64, −inf where a row does not see a key."""
    allowed = visible(len(q), len(k), rule, q.device)
    scores = q.double().transpose(0, 1) @ _expand(k, q.shape[1]).transpose(1, 2) * rule.scale
    return scores.masked_fill(~allowed, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores − lse), 0 for a row that sees nothing."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _expand(x: Tensor, heads: int) -> Tensor:
    """[Lk, Hk, D] -> [Hq, Lk, D] float64, each key head repeated for the query heads that read it."""
    return x.double().transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0)


def _gather_heads(x: Tensor, kv_heads: int) -> Tensor:
    """[Hq, Lk, D] -> [Lk, Hk, D], summed over the query heads that read a key head."""
    return x.view(kv_heads, -1, *x.shape[1:]).sum(dim=1).transpose(0, 1)


def _refusal(request: Request) -> str | None:  # noqa: ARG001 -- it can do everything
    return None


BACKEND = Backend(forward=forward, backward=backward, refusal=_refusal)
