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
from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments

NAME = "flash-attn 3"


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
    """See `base.BlockForward`."""
    if flash.is_empty(q, k, segments):
        return flash.empty_forward(q)
    flash.check_segments(NAME, segments)
    k, v = (flash.without_tail(x, segments.cu_k) for x in (k, v))
    out, lse, *_ = _library()._flash_attn_forward(
        *map(flash.loadable, (q, k, v)),
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.max_q,
        max_seqlen_k=segments.max_k,
        softmax_scale=rule.scale,
        causal=rule.causal,
        **_sides(segments, rule),
    )
    return flash.clean_forward(out, lse, segments)


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
    if flash.is_empty(q, k, segments):
        return flash.empty_backward(q, k, v)
    flash.check_segments(NAME, segments)
    dout, q = (flash.without_tail(x, segments.cu_q) for x in (dout, q))
    k, v = (flash.without_tail(x, segments.cu_k) for x in (k, v))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    _library()._flash_attn_backward(
        *map(flash.loadable, (dout, q, k, v, out)),
        softmax_lse=lse.contiguous(),
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.max_q,
        max_seqlen_k=segments.max_k,
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=rule.scale,
        is_causal=rule.causal,
        deterministic=flash.deterministic(),
        **_sides(segments, rule),
    )
    return flash.clean_backward(dq, dk, dv, segments)


def _sides(segments: Segments, rule: Rule) -> dict[str, int]:
    left, right = flash.window_sides(segments, rule, unlimited=-1)
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
