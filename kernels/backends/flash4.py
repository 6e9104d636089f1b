"""Attention by flash-attn 4 (the package `flash-attn-4`, module `flash_attn.cute`), on Hopper and Blackwell.

bfloat16 and float16, fewer key heads, windows, rings, causal or not. Head widths in multiples of 8: up to 256 on
Hopper, up to 128 and 256 (without a window) on Blackwell. As in flash-attn 3, tiles reach past a segment's end, so rows
after the last segment are made 0 in copies first. Releases before 4.0.0b14 are refused: at a width of 256 they fail on
segments without queries (flash-attention #2562). Not yet run on a GPU: written from the package's source, tested over
stand-ins for it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from seqmesh.kernels.backends import flash
from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments

NAME = "flash-attn 4"


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
    """See `base.BlockForward`."""
    if flash.is_empty(q, k, segments):
        return flash.empty_forward(q)
    flash.check_size(NAME, q, k, segments)
    q, k, v = map(flash.loadable, (q, flash.without_tail(k, segments.cu_k), flash.without_tail(v, segments.cu_k)))
    out, lse = _library().flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.max_q,
        max_seqlen_k=segments.max_k,
        softmax_scale=rule.scale,
        causal=rule.causal,
        window_size=flash.window_sides(segments, rule, unlimited=None),
        return_lse=True,
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
    flash.check_size(NAME, q, k, segments)
    left, right = flash.window_sides(segments, rule, unlimited=None)
    dq, dk, dv = _library()._flash_attn_bwd(
        q=flash.loadable(flash.without_tail(q, segments.cu_q)),
        k=flash.loadable(flash.without_tail(k, segments.cu_k)),
        v=flash.loadable(flash.without_tail(v, segments.cu_k)),
        out=flash.loadable(out),
        dout=flash.loadable(flash.without_tail(dout, segments.cu_q)),
        lse=lse.contiguous(),
        softmax_scale=rule.scale,
        causal=rule.causal,
        window_size_left=left,
        window_size_right=right,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.max_q,
        max_seqlen_k=segments.max_k,
        deterministic=flash.deterministic(),
    )
    return flash.clean_backward(dq, dk, dv, segments)


def _library() -> ModuleType:
    return importlib.import_module("flash_attn.cute.interface")


def _refusal(request: Request) -> str | None:
    return (
        flash.device_refusal(request)
        or flash.library_refusal(NAME, ("flash_attn.cute.interface",), distribution="flash-attn-4", least="4.0.0b14")
        or flash.build_refusal()
        or flash.capability_refusal(request, range(9, 12))
        or flash.shape_refusal(request)
        or _blackwell_refusal(request)
    )


def _blackwell_refusal(request: Request) -> str | None:
    if torch.cuda.get_device_capability(request.device)[0] == 9 or request.head_dim <= 128:
        return None
    if request.head_dim != 256:
        return f"head_dim is {request.head_dim}: must be at most 128, or 256, on this device"
    return f"window is {request.window}: there is none for head_dim 256 on this device" if request.window else None


BACKEND = Backend(forward=forward, backward=backward, refusal=_refusal)
