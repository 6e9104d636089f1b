"""Attention by flash-attn 2 (the package `flash-attn`, 2.7 or later), on GPUs from Ampere on.

bfloat16 and float16, head widths in multiples of 8 up to 256, fewer key heads, windows, rings. Causal or not, and with
segments of any lengths, also 0 (flash-attention #1537: where the longest segment has one query row it reads q as
[N, Hq, D], so it is told of two). Not yet run on a GPU: written from the package's source, tested over stand-ins for
it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from seqmesh.kernels.backends import flash
from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments

NAME = "flash-attn 2"


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
    """See `base.BlockForward`."""
    if flash.is_empty(q, k, segments):
        return flash.empty_forward(q)
    flash.check_size(NAME, q, k, segments)
    out, lse, *_ = _library()._flash_attn_varlen_forward(
        *map(flash.loadable, (q, k, v)),
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        dropout_p=0.0,
        softmax_scale=rule.scale,
        causal=rule.causal,
        **mask_arguments(segments, rule, names=("max_seqlen_q", "max_seqlen_k")),
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
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    _library()._flash_attn_varlen_backward(
        *map(flash.loadable, (dout, q, k, v, out)),
        softmax_lse=as_written(lse),
        dq=dq,
        dk=dk,
        dv=dv,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        dropout_p=0.0,
        softmax_scale=rule.scale,
        causal=rule.causal,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=flash.deterministic(),
        **mask_arguments(segments, rule, names=("max_seqlen_q", "max_seqlen_k")),
    )
    return flash.clean_backward(dq, dk, dv, segments)


def mask_arguments(segments: Segments, rule: Rule, *, names: tuple[str, str]) -> dict[str, int]:
    """The arguments that say what a row sees, for flash-attn 2 and for torch's copy of it; names: of the two lengths.

    A side that reaches the longest keys is taken for one without limit, also where a segment with more queries than
    keys has rows so far before its first key that the window does not reach it; a longer "longest" keeps it.
    """
    left, right = flash.window_sides(segments, rule, unlimited=-1)
    longest_k = segments.max_k if right < 1 else max(segments.max_q, segments.max_k)
    lengths = dict(zip(names, (max(segments.max_q, 2), longest_k), strict=True))
    return lengths | {"window_size_left": left, "window_size_right": right}


def as_written(lse: Tensor) -> Tensor:
    """lse as the library would have it: +inf, whatever the scores, makes the probabilities of a row 0."""
    return lse.masked_fill(lse == -torch.inf, torch.inf).contiguous()


def _library() -> ModuleType:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _refusal(request: Request) -> str | None:
    return (
        flash.device_refusal(request)
        or flash.library_refusal(
            NAME, ("flash_attn.flash_attn_interface", "flash_attn_2_cuda"), distribution="flash-attn", least="2.7"
        )
        or flash.build_refusal()
        or flash.capability_refusal(request, range(8, 13))
        or flash.shape_refusal(request)
    )


BACKEND = Backend(forward=forward, backward=backward, refusal=_refusal)
