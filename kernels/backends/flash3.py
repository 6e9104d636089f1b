"""Attention by flash-attn 3 (the package `flash_attn_3`, built from sources of July 2025 or later), on Hopper only.

bfloat16 and float16, head widths in multiples of 8 up to 256, fewer key heads, windows, rings, causal or not. It loads
keys and values in tiles that reach past a segment's end, so rows after the last segment are made 0 in copies first,
whatever they hold. Not yet run on a GPU: written from the package's source, tested over stand-ins for it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from seqmesh.kernels.backends import flash
from seqmesh.kernels.backends.base import Backend, Request

NAME = "flash-attn 3"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `base.BlockForward`."""
    if flash.is_empty(q, k, cu_q, max_q, max_k):
        return flash.empty_forward(q)
    flash.check_segments(NAME, cu_q)
    k, v = (flash.without_tail(x, cu_k) for x in (k, v))
    out, lse, *_ = _library()._flash_attn_forward(
        *map(flash.loadable, (q, k, v)),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        causal=causal,
        **_sides(max_q, max_k, causal=causal, window=window),
    )
    return flash.clean_forward(out, lse, cu_q)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `base.BlockBackward`."""
    if flash.is_empty(q, k, cu_q, max_q, max_k):
        return flash.empty_backward(q, k, v)
    flash.check_segments(NAME, cu_q)
    dout, q = (flash.without_tail(x, cu_q) for x in (dout, q))
    k, v = (flash.without_tail(x, cu_k) for x in (k, v))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    _library()._flash_attn_backward(
        *map(flash.loadable, (dout, q, k, v, out)),
        softmax_lse=lse.contiguous(),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale,
        is_causal=causal,
        deterministic=flash.deterministic(),
        **_sides(max_q, max_k, causal=causal, window=window),
    )
    return flash.clean_backward(dq, dk, dv, cu_q, cu_k)


def _sides(max_q: int, max_k: int, *, causal: bool, window: int | None) -> dict[str, int]:
    left, right = flash.window_sides(causal=causal, window=window, max_q=max_q, max_k=max_k, unlimited=-1)
    return {"window_size_left": left, "window_size_right": right}


def _library() -> ModuleType:
    return importlib.import_module("flash_attn_interface")


def _refusal(request: Request) -> str | None:
    return (
        flash.device_refusal(request)
        or flash.library_refusal(NAME, ("flash_attn_interface", "flash_attn_3"))
        or flash.build_refusal()
        or flash.capability_refusal(request, range(9, 10))
        or flash.shape_refusal(request)
        or _not_deterministic(request)
    )


def _not_deterministic(request: Request) -> str | None:
    if request.gradient and flash.deterministic() and request.head_dim > 192:
        return f"head_dim is {request.head_dim}: {NAME} has deterministic gradients up to 192 only"
    return None


BACKEND = Backend(forward=forward, backward=backward, refusal=_refusal)
