"""Attention on the CPU: torch's native flash operators, forward and backward, over flat buffers.

A segment is one native call where that wastes little, and a few blocks elsewhere, see `cpu_blocks`. Half precision is
computed in float32 and rounded once: the operators add gradients up in the dtype of their inputs, and are hardly faster
in bfloat16 and many times slower in float16. Every sum has one order, so results are the same bits in every run, with
any number of threads.

Shapes: Tq query rows and Tk key rows, Hq query heads, Hk key and value heads, D head width. Tensors of one segment are
native views: [1, H, rows, D], and [1, Hq, rows] for log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments, statistics_dtype
from seqmesh.kernels.backends.cpu_blocks import Block, blocks, is_short, key_strips, query_strips
from seqmesh.kernels.merge import merge

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# The operators under torch.nn.functional.scaled_dot_product_attention. Called without it, they take strided views,
# leave out the full-size zero gradient that autograd makes for every slice, and hand out the log-sum-exp. A call
# without rows or keys ends the process, and a row that sees no key gets lse 0: neither is ever asked of them.
_flash_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
    """See `base.BlockForward`."""
    causal, window, scale = rule
    dtype = statistics_dtype(q.dtype)
    out, lse = q.new_zeros(q.shape), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=dtype)
    by_queries = _segments(segments.cu_q, _native(q), _native(out), lse.unsqueeze(0))
    by_keys = _segments(segments.cu_k, _native(k), _native(v))
    for (query, result, result_lse), (key, value) in zip(by_queries, by_keys, strict=True):
        rows, keys = query.shape[2], key.shape[2]
        inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
        if is_short(rows, keys, causal=causal, window=window):
            part, part_lse = _flash_forward(*inputs, 0.0, causal, scale=scale)
            result.copy_(part)
            result_lse.copy_(part_lse)
            continue
        wide = _zeros(result, dtype)
        for block in blocks(rows, keys, causal=causal, window=window, cut=query_strips, dtype=dtype):
            _attend(block, inputs, wide, result_lse, scale)
        result.copy_(wide)
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
    causal, window, scale = rule
    dtype = statistics_dtype(q.dtype)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    by_queries = _segments(segments.cu_q, *(_native(x) for x in (dout, q, out, dq)), lse.unsqueeze(0))
    by_keys = _segments(segments.cu_k, *(_native(x) for x in (k, v, dk, dv)))
    for (grad, query, output, sum_q, row_lse), (key, value, sum_k, sum_v) in zip(by_queries, by_keys, strict=True):
        rows, keys = query.shape[2], key.shape[2]
        inputs = (*(x.to(dtype) for x in (grad, query, key, value, output)), row_lse)
        if is_short(rows, keys, causal=causal, window=window):
            gradients = _flash_backward(*inputs, 0.0, causal, scale=scale)
        else:
            gradients = tuple(_zeros(x, dtype) for x in (sum_q, sum_k, sum_v))
            for block in blocks(rows, keys, causal=causal, window=window, cut=key_strips, dtype=dtype):
                _differentiate(block, inputs, gradients, scale)
        for total, gradient in zip((sum_q, sum_k, sum_v), gradients, strict=True):
            total.copy_(gradient)
    return dq, dk, dv


def _segments(cu: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the tensors [1, H, T, ...], segment by segment."""
    bounds: list[int] = cu.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    return zip(*(torch.split(x.narrow(2, 0, bounds[-1]), lengths, dim=2) for x in tensors), strict=True)


def _native(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], without a copy where possible.

    The operators take a last dimension's stride for 1, whatever it is, and cannot read rows that overlap.
    """
    x = x if x.stride(2) == 1 and x.stride(0) >= x.shape[2] else x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def _zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros like x, which is zero, to add up in: itself if it is of that dtype."""
    return x if x.dtype == dtype else torch.zeros_like(x, dtype=dtype)


def _attend(block: Block, inputs: tuple[Tensor, ...], result: Tensor, result_lse: Tensor, scale: float) -> None:
    """Write a block's attention to its rows of the results, or merge it with what they hold."""
    sides = (block.queries, block.keys, block.keys)
    views = (x[:, :, side] for x, side in zip(inputs, sides, strict=True))
    part, part_lse = _flash_forward(*views, 0.0, block.causal, attn_mask=block.mask, scale=scale)
    result, result_lse = result[:, :, block.queries], result_lse[:, :, block.queries]
    if block.again:
        merged, part_lse = merge(_by_row(result), result_lse[0], _by_row(part), part_lse[0])
        part = merged.transpose(0, 1)
    result.copy_(part)
    result_lse.copy_(part_lse)


def _by_row(x: Tensor) -> Tensor:
    """[1, H, rows, D] -> [rows, H, D]."""
    return x[0].transpose(0, 1)


def _differentiate(block: Block, inputs: tuple[Tensor, ...], sums: tuple[Tensor, ...], scale: float) -> None:
    """Add a block's gradients to those of its segment: dq, dk, dv."""
    queries, keys = block.queries, block.keys
    sides = (queries, queries, keys, keys, queries, queries)
    views = (x[:, :, side] for x, side in zip(inputs, sides, strict=True))
    parts = _flash_backward(*views, 0.0, block.causal, attn_mask=block.mask, scale=scale)
    for total, part, side in zip(sums, parts, (queries, keys, keys), strict=True):
        total[:, :, side] += part


def _refusal(request: Request) -> str | None:
    if request.device.type != "cpu":
        return f"tensors are on {request.device.type}, this back end runs on cpu"
    if request.dtype not in DTYPES:
        return f"dtype is {request.dtype}, must be one of {', '.join(map(str, DTYPES))}"
    return None


BACKEND = Backend(forward=forward, backward=backward, refusal=_refusal)
