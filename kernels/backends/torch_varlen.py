"""Attention by torch's own copy of flash-attn 2, on GPUs from Ampere on: nothing to install.

The operators are `aten::_flash_attention_forward` and `_backward`, which torch.nn.attention.varlen wraps: they take
cumulative lengths, both sides of a window, fewer key heads, and, backward, any output and log-sum-exp. bfloat16 and
float16, head widths in multiples of 8 up to 256, causal or not, rings. Not yet run on a GPU: written from torch's
source, tested over stand-ins for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqmesh.kernels.backends import flash
from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments
from seqmesh.kernels.backends.flash2 import as_written, mask_arguments

NAME = "torch's flash attention"


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
    """See `base.BlockForward`."""
    if flash.is_empty(q, k, segments):
        return flash.empty_forward(q)
    flash.check_size(NAME, q, k, segments)
    out, lse, *_ = _operators()._flash_attention_forward(
        *map(flash.loadable, (q, k, v)),
        cum_seq_q=segments.cu_q,
        cum_seq_k=segments.cu_k,
        dropout_p=0.0,
        is_causal=rule.causal,
        return_debug_mask=False,
        scale=rule.scale,
        **mask_arguments(segments, rule, names=("max_q", "max_k")),
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
    """See `base.BlockBackward`. The operator asks torch itself whether it has to be deterministic."""
    if flash.is_empty(q, k, segments):
        return flash.empty_backward(q, k, v)
    flash.check_size(NAME, q, k, segments)
    dq, dk, dv = _operators()._flash_attention_backward(
        *map(flash.loadable, (dout, q, k, v, out)),
        logsumexp=as_written(lse),
        cum_seq_q=segments.cu_q,
        cum_seq_k=segments.cu_k,
        dropout_p=0.0,
        is_causal=rule.causal,
        rng_state=torch.zeros(2, dtype=torch.uint64, device=q.device),  # of the dropout that there is none of
        unused=torch.empty(0, device=q.device),
        scale=rule.scale,
        **mask_arguments(segments, rule, names=("max_q", "max_k")),
    )
    return flash.clean_backward(dq, dk, dv, segments)


def _operators() -> Any:
    return torch.ops.aten


def _refusal(request: Request) -> str | None:
    return (
        flash.device_refusal(request)
        or flash.build_refusal()
        or _not_built()
        or flash.capability_refusal(request, range(8, 13))
        or flash.shape_refusal(request)
    )


def _not_built() -> str | None:
    if torch.backends.cuda.is_flash_attention_available():
        return None
    return "this build of torch has no flash attention"


BACKEND = Backend(forward=forward, backward=backward, refusal=_refusal)
