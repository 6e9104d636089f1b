"""Attention on the CPU: one native flash call per document, forward and backward, over flat buffers.

Two pairs: `pack_forward` and `pack_backward` for all segments of a pack, resting on `block_forward` and
`block_backward` for one block of queries and one block of keys. The backward halves take the whole row's output and
log-sum-exp, so blocks that each saw only a part of a row's keys give exact gradients that simply add up.

It knows no sliding window, no autograd, and checks no layout: `seqmesh.kernels.attention` does, and is the way in.

Shapes: T packed rows, Q query rows, K key rows, Hq query heads, Hk key and value heads (Hk divides Hq), D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Below this many rows the kernel's half-precision path loses more to conversions than it saves in arithmetic.
UPCAST_ROWS = 256

# The operators under torch.nn.functional.scaled_dot_product_attention. Called without it, they take strided views,
# leave out the full-size zero gradient that autograd makes for every slice, and hand out the log-sum-exp.
_flash_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def pack_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[int], *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend inside every segment; segment i is rows bounds[i] to bounds[i + 1], padding follows the last.

    q [T, Hq, D], k and v [T, Hk, D] -> out [T, Hq, D] in q's dtype, lse [T, Hq] as block_forward gives it; padding has
    out 0 and lse −inf.
    """
    out = _flat_buffer(q, bounds[-1])
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=_wide(q.dtype))
    for rows in _segments(bounds):
        out[rows], lse[rows] = block_forward(q[rows], k[rows], v[rows], causal=causal, scale=scale)
    return out, lse


def pack_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: list[int],
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of pack_forward, 0 for padding, into one buffer each whatever the number of segments.

    out [T, Hq, D] and lse [T, Hq] belong to the whole row, as in block_backward.
    """
    dq, dk, dv = (_flat_buffer(x, bounds[-1]) for x in (q, k, v))
    for rows in _segments(bounds):
        dq[rows], dk[rows], dv[rows] = block_backward(
            dout[rows], q[rows], k[rows], v[rows], out[rows], lse[rows], causal=causal, scale=scale
        )
    return dq, dk, dv


def block_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend one block of queries to one block of keys.

    q [Q, Hq, D], k and v [K, Hk, D] -> out [Q, Hq, D] in q's dtype, lse [Q, Hq] in float32 (float64 for float64): the
    natural log of the sum of exp(scale · q·k) over the keys a row sees. With causal, row i sees keys 0..i. A block
    without keys gives out 0 and lse −inf, the neutral element of merging blocks. Raises ValueError for a causal block
    that is not square and for heads that do not divide: the native operator would go wrong there without a word.
    """
    _check_block(q, k, causal)
    if q.shape[0] == 0 or k.shape[0] == 0:  # the native operator kills the process on these
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=_wide(q.dtype))
    dtype = _compute_dtype(q, k)
    query, key, value = (_to_native(x, dtype) for x in (q, k, v))
    out, lse = _flash_forward(query, key, value, 0.0, causal, scale=scale)
    return _from_native(out, q.dtype), lse[0].transpose(0, 1)


def block_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block: (dq [Q, Hq, D], dk [K, Hk, D], dv [K, Hk, D]), in the dtypes of q, k and v.

    out [Q, Hq, D] and lse [Q, Hq] belong to the whole row, over all blocks of keys that its queries attend to; then dq
    summed over blocks of keys, dk and dv summed over blocks of queries are the gradients of the undivided attention.
    Formulas: FlashAttention-2 (Dao 2023), section 3.1.2. Raises as block_forward does.
    """
    _check_block(q, k, causal)
    if q.shape[0] == 0 or k.shape[0] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dtype = _compute_dtype(q, k)
    grad, query, key, value, output = (_to_native(x, dtype) for x in (dout, q, k, v, out))
    row_lse = lse.to(_wide(dtype)).transpose(0, 1).unsqueeze(0)
    dq, dk, dv = _flash_backward(grad, query, key, value, output, row_lse, 0.0, causal, scale=scale)
    return _from_native(dq, q.dtype), _from_native(dk, k.dtype), _from_native(dv, v.dtype)


def _segments(bounds: list[int]) -> Iterator[slice]:
    """The row ranges of the segments that have rows."""
    return (slice(start, stop) for start, stop in pairwise(bounds) if start < stop)


def _flat_buffer(like: Tensor, end: int) -> Tensor:
    """A buffer of `like`'s shape. Segments fill rows 0 to end without a gap; the padding after them is set to zero."""
    buffer = like.new_empty(like.shape)
    buffer[end:].zero_()
    return buffer


def _check_block(q: Tensor, k: Tensor, causal: bool) -> None:
    if causal and q.shape[0] != k.shape[0]:
        raise ValueError(f"a causal block has {q.shape[0]} queries and {k.shape[0]} keys: must be square")
    if q.shape[1] % k.shape[1]:  # the native operator divides by the quotient: a crash for fewer query than key heads
        raise ValueError(f"q has {q.shape[1]} heads and k has {k.shape[1]}: the second must divide the first")


def _compute_dtype(q: Tensor, k: Tensor) -> torch.dtype:
    short = max(q.shape[0], k.shape[0]) <= UPCAST_ROWS
    return _wide(q.dtype) if short else q.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _to_native(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, H, D] -> [1, H, rows, D] without a copy where possible.

    The native operator reads the last dimension as if its stride were 1, whatever it is.
    """
    x = x.to(dtype)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def _from_native(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, H, rows, D] -> [rows, H, D]."""
    return x[0].transpose(0, 1).to(dtype)
