"""Attention over packed documents of any lengths: checks the request, picks a back end, refuses what it cannot do.

Takes q, k, v as one row per token and a `Layout` that says where documents begin and end, and which of them are spread
over ranks; a token attends to tokens of its own document only, wherever they are. A back end that cannot honour a
request is never run "nearly right": the call raises. A whole pack, with all its rings, is one autograd node.

Shapes: T packed rows, Hq query heads, Hk key and value heads (Hk divides Hq), D head width, N segments.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqmesh.kernels.backends.base import Backend, Rule
from seqmesh.kernels.backends.table import AUTO, choose
from seqmesh.kernels.layout import Layout
from seqmesh.kernels.operators import attend_forward, request_of
from seqmesh.kernels.rings.checks import check_exchange, check_rings
from seqmesh.kernels.rings.spread import spread_backward, spread_forward


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    causal: bool = ...,
    window: int | None = ...,
    scale: float | None = ...,
    backend: str = ...,
    exchange: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    causal: bool = ...,
    window: int | None = ...,
    scale: float | None = ...,
    backend: str = ...,
    exchange: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    backend: str = AUTO,
    exchange: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v inside every segment of the layout. Differentiable once in q, k and v.

    q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D]; query head h reads key head h // (Hq / Hk). Rows from
    cu_seqlens[-1] on are padding: whatever they hold, NaN included, their output and gradients are exactly 0.
    window: how many keys a row sees, itself included, and without causal as many to the other side; None or 0 is all.
    scale: 1 / sqrt(D) unless given. backend: a name in `backends.table.BACKENDS`, "flash" for any version of
    flash-attn, or "auto" for the first back end that can honour the request. return_lse: also return the log-sum-exp
    [Hq, T] of each row's scores, float32 (float64 for float64), −inf for padding; it carries no gradient.

    With rings in the layout the call sends and receives, `exchange` ("auto", "ring" or "gather") says how:
    `seqmesh.kernels.rings.spread` tells what, and why it cannot deadlock. Every member of a ring makes the call, and
    its backward, in the same order and with the same arguments. Bytes sent are added to layout.traffic. Without rings
    it compiles, as one operator, into a graph that serves all packs.

    Raises ValueError for tensors or a layout that break the contract, NotImplementedError where no back end (or not
    the one named) can honour the request, RuntimeError for rings without a process group. Segment bounds are read,
    hence checked, on the CPU only: on a device that would make every call wait for it.
    """
    _check_tensors(q, k, v)
    _check_layout(layout, q)
    if window is not None and window < 0:
        raise ValueError(f"window is {window}: must be a number of keys, or None for all")
    window = window or None
    check_exchange(layout, exchange, causal=causal, window=window)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if layout.rings:
        out, lse = _spread(q, k, v, layout, Rule(causal, window, scale), backend, exchange, gradient)
    else:
        cu, longest = layout.cu_seqlens, layout.max_seqlen
        out, lse = attend_forward(q, k, v, cu, cu, longest, longest, causal, window, scale, backend, gradient)
    return (out, lse) if return_lse else out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own is not typed
def _spread(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    rule: Rule,
    backend: str,
    exchange: str,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    """A pack with rings: which ranks talk is no graph's business, so a compiled model leaves its graph here."""
    check_rings(layout)
    chosen = choose(backend, request_of(q, k, causal=rule.causal, window=rule.window, rings=True, gradient=gradient))
    out, lse = _SpreadAttention.apply(q, k, v, layout, chosen, rule, exchange)  # type: ignore[no-untyped-call]
    return out, lse


class _SpreadAttention(torch.autograd.Function):
    """All segments of a pack and all its rings."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        backend: Backend,
        rule: Rule,
        exchange: str,
    ) -> tuple[Tensor, Tensor]:
        out, lse = spread_forward(q, k, v, layout, backend.forward, rule, exchange)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.backend, ctx.how = layout, backend, (rule, exchange)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 -- not differentiable
        q, k, v, out, lse = ctx.saved_tensors
        gradients = spread_backward(dout, q, k, v, out, lse, ctx.layout, ctx.backend.backward, *ctx.how)
        return *gradients, *[None] * 4


def attention_again(q: Tensor, k: Tensor, v: Tensor, layout: Layout, out: Tensor, lse: Tensor) -> Tensor:
    """Stands for a call of `varlen_attention` that gave out and lse, where a forward pass runs again only to make what
    was saved once more: saves what that call saved, returns out, computes and sends nothing. It has no backward."""
    bounds = () if layout.rings else (layout.cu_seqlens, layout.cu_seqlens)
    given: Tensor = _Again.apply(q, k, v, out, lse, *bounds)  # type: ignore[no-untyped-call]
    return given


class _Again(torch.autograd.Function):
    """Saves what `_SpreadAttention`, or the operator where there are no rings, saves, in the same order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *bounds: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, out, lse, *bounds)
        return out.view_as(out)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        raise RuntimeError("this attention was not computed: it has no backward")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"shapes are {_shapes(q, k, v)}: must be q [T, Hq, D], k and v [T, Hk, D]")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"shapes are {_shapes(q, k, v)}: rows and head width must be equal")
    if 0 in (q.shape[1], k.shape[1], q.shape[2]):
        raise ValueError(f"shapes are {_shapes(q, k, v)}: heads and head width must be at least 1")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k has {k.shape[1]}: the second must divide the first")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes are q {q.dtype}, k {k.dtype}, v {v.dtype}: must be equal")
    if not q.device == k.device == v.device:
        raise ValueError(f"devices are q {q.device}, k {k.device}, v {v.device}: must be equal")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def _check_layout(layout: Layout, q: Tensor) -> None:
    cu_seqlens = layout.cu_seqlens
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}: must be int32 [N + 1]")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, q on {q.device}: must be the same")
