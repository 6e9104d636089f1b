"""Attention by torch's FlexAttention, compiled for the GPU at hand: for dtypes and head widths that flash has not.

What a row sees is one run of neighbouring keys, so the mask is two integers a row; tiles that no row of theirs sees are
never visited. Its backward pass makes the log-sum-exp anew, over the keys of the call, hence no rings; and it makes the
forward pass anew, which costs a third more. On the CPU forward only, uncompiled, with all scores in memory: for tests.
On CUDA not yet run.

Shapes: Tq query and Tk key rows, Hq and Hk heads, D head width.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqmesh.kernels.backends import flash
from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments, statistics_dtype

TILE = 128  # rows and keys; torch's own choice
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
    """See `base.BlockForward`."""
    if flash.is_empty(q, k, segments):
        return flash.empty_forward(q)
    k, v = (flash.without_tail(x, segments.cu_k) for x in (k, v))
    first, stop = key_ranges(segments, rule, len(q))
    with torch.no_grad():
        out, lse = _attend(q, k, v, first, stop, rule.scale)
    return flash.clean_forward(out, lse.to(statistics_dtype(q.dtype)), segments)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # noqa: ARG001 -- part of the contract
    lse: Tensor,  # noqa: ARG001
    segments: Segments,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `base.BlockBackward`; out and lse must be those of the call's own keys, and are not read."""
    if flash.is_empty(q, k, segments):
        return flash.empty_backward(q, k, v)
    first, stop = key_ranges(segments, rule, len(q))
    tails = ((q, segments.cu_q), (k, segments.cu_k), (v, segments.cu_k))
    q, k, v = (flash.without_tail(x, cu).requires_grad_() for x, cu in tails)
    with torch.enable_grad():
        again, _ = _attend(q, k, v, first, stop, rule.scale)
    dq, dk, dv = torch.autograd.grad(again, (q, k, v), flash.without_tail(dout, segments.cu_q))
    return flash.clean_backward(dq, dk, dv, segments)


def key_ranges(segments: Segments, rule: Rule, rows: int) -> tuple[Tensor, Tensor]:
    """(first, stop), each int32 [rows]: query row r sees the key rows first[r] <= j < stop[r]. Neither falls with r."""
    cu_q, cu_k, *_ = segments
    row = torch.arange(rows, dtype=torch.int32, device=cu_q.device)
    segment = torch.searchsorted(cu_q[1:].contiguous(), row, right=True).clamp(max=len(cu_q) - 2)
    first, end = cu_k[segment], cu_k[segment + 1]
    position = row + end - cu_q[segment + 1]  # of the row among all key rows
    stop = torch.minimum(end, position + 1) if rule.causal else end
    if rule.window is not None:
        first = torch.maximum(first, position - rule.window + 1)
        stop = torch.minimum(stop, position + rule.window)
    beyond = flash.tail(cu_q, rows)
    first, stop = (torch.where(beyond, cu_k[-1], bound) for bound in (first, stop))
    return first, torch.maximum(first, stop)


def visible_tiles(first: Tensor, stop: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """(some, every), bool [row tiles, key tiles]: where a row may see a key, and where every row sees every key."""
    top = torch.arange(0, len(first), TILE, device=first.device)
    bottom = (top + TILE - 1).clamp(max=len(first) - 1)
    left = torch.arange(0, keys, TILE, device=first.device)
    some = (left < stop[bottom, None]) & (left + TILE > first[top, None])
    return some, (left >= first[bottom, None]) & (left + TILE <= stop[top, None])


def _attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out [Tq, Hq, D], lse [Hq, Tq])."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 -- as called
        return (first[row] <= key) & (key < stop[row])

    some, every = visible_tiles(first, stop, len(k))
    mask = BlockMask.from_kv_blocks(
        *_ordered(some & ~every), *_ordered(every), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(len(q), len(k))
    )
    out, extra = _flex_attention(q.device.type)(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return out.squeeze(0).transpose(0, 1).contiguous(), extra.lse.squeeze(0)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, rows, columns] bool as BlockMask has it: how many are set in each row, and which, these first."""
    order = tiles.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


@functools.cache
def _flex_attention(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return _quietly(flex_attention) if device == "cpu" else torch.compile(flex_attention, dynamic=True)


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without the warning that it is slow, which this module gives in its docstring."""

    def call(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return function(*arguments, **options)

    return call


def _refusal(request: Request) -> str | None:
    if request.rings:
        return "its gradients cannot take the log-sum-exp of a ring"
    if request.dtype not in DTYPES:
        return f"dtype is {request.dtype}: must be one of {', '.join(map(str, DTYPES))}"
    if request.head_dim < 16:
        return f"head_dim is {request.head_dim}: must be at least 16"
    if request.device.type == "cpu":
        return "it has no gradients on the CPU" if request.gradient else None
    return (
        flash.device_refusal(request)
        or flash.library_refusal("triton", ("triton",))
        or flash.build_refusal()
        or flash.capability_refusal(request, range(8, 13))
    )


BACKEND = Backend(forward=forward, backward=backward, refusal=_refusal)
