"""Attention over packed documents of any lengths: checks the request, picks a back end, refuses what it cannot do.

Takes q, k, v as one row per token and a `Layout` that says where documents begin and end, and which of them are spread
over ranks; a token attends to tokens of its own document only, wherever they are. A back end that cannot honour a
request is never run "nearly right": the call raises. A whole pack, with all its rings, is one autograd node.

Shapes: T packed rows, Hq query heads, Hk key and value heads (Hk divides Hq), D head width, N segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqmesh.kernels import cpu, ring
from seqmesh.kernels.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to compute attention, and what it can do. Every function gets what passed the checks below.

    pack_forward and pack_backward do all segments of a pack, block_forward and block_backward one block of queries and
    one of keys: signatures and promises are those of `seqmesh.kernels.cpu`.
    """

    pack_forward: Callable[..., tuple[Tensor, Tensor]]
    pack_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    block_forward: Callable[..., tuple[Tensor, Tensor]]
    block_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    device: str
    dtypes: tuple[torch.dtype, ...]


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(
        pack_forward=cpu.pack_forward,
        pack_backward=cpu.pack_backward,
        block_forward=cpu.block_forward,
        block_backward=cpu.block_backward,
        device="cpu",
        dtypes=cpu.DTYPES,
    ),
}


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(scale · q kᵀ) v inside every segment of the layout. Differentiable once in q, k and v.

    q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D]; query head h reads key head h // (Hq / Hk). Rows from
    cu_seqlens[-1] on are padding: whatever they hold, NaN included, their output and gradients are exactly 0.
    window: how many keys a row sees, itself included; None or 0 is all. scale: 1 / sqrt(D) unless given.
    backend: a name in BACKENDS, or "auto" for the first one that can honour the request.

    With rings in the layout the call sends and receives (`seqmesh.kernels.ring` says what and why it cannot deadlock):
    every member of a ring makes it, and its backward, in the same order. Bytes sent are added to layout.traffic.

    Raises ValueError for tensors or a layout that break the contract, NotImplementedError where no back end (or not
    the one named) can honour the request, RuntimeError for rings without a process group. Segment bounds are read,
    hence checked, on the CPU only: on a device that would make every call wait for it.
    """
    _check_tensors(q, k, v)
    if window is not None and window < 0:
        raise ValueError(f"window is {window}: must be a number of keys, or None for all")
    if window and layout.rings:
        raise NotImplementedError(f"window is {window} and the layout has rings: no sliding window over ranks yet")
    chosen = _choose(backend, q, window or None)
    _check_layout(layout, q)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out: Tensor = _PackedAttention.apply(q, k, v, layout, chosen, causal, scale)  # type: ignore[no-untyped-call]
    return out


class _PackedAttention(torch.autograd.Function):
    """All segments of a pack and all its rings. The rings' first blocks travel while the segments are computed."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, backend: Backend, causal: bool, scale: float
    ) -> Tensor:
        bounds: list[int] = layout.cu_seqlens.tolist()
        circuits = ring.start_circuits(k, v, layout.rings, bounds, layout.traffic, causal=causal)
        out, lse = backend.pack_forward(q, k, v, bounds, causal=causal, scale=scale)
        ring.finish_forward(out, lse, q, circuits, backend.block_forward, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.bounds, ctx.backend, ctx.causal, ctx.scale = layout, bounds, backend, causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, bounds, backend, scale = ctx.layout, ctx.bounds, ctx.backend, ctx.scale
        circuits = ring.start_circuits(k, v, layout.rings, bounds, layout.traffic, causal=ctx.causal)
        gradients = backend.pack_backward(dout, q, k, v, out, lse, bounds, causal=ctx.causal, scale=scale)
        ring.finish_backward(gradients, (dout, q, out, lse), circuits, backend.block_backward, scale)
        return *gradients, None, None, None, None


def _choose(name: str, q: Tensor, window: int | None) -> Backend:
    """The back end called `name`, or for "auto" the first that can; raises with every candidate's reason."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend is {name!r}: must be 'auto' or one of {sorted(BACKENDS)}")
    candidates = BACKENDS if name == "auto" else {name: BACKENDS[name]}
    reasons = {}
    for candidate, backend in candidates.items():
        reason = _refusal(backend, q, window)
        if reason is None:
            return backend
        reasons[candidate] = reason
    listed = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    raise NotImplementedError(f"no attention back end can do this ({listed})")


def _refusal(backend: Backend, q: Tensor, window: int | None) -> str | None:
    """Why the back end cannot honour the request, or None."""
    if q.device.type != backend.device:
        return f"tensors are on {q.device.type}, this back end runs on {backend.device} and there is none for the other"
    if q.dtype not in backend.dtypes:
        return f"dtype is {q.dtype}, must be one of {', '.join(map(str, backend.dtypes))}"
    if window is not None:
        return f"window is {window}, this back end has no sliding window yet"
    return None


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
    if cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        _check_bounds(bounds, layout.max_seqlen, q.shape[0])
        ring.check_rings(layout.rings, bounds)


def _check_bounds(bounds: list[int], max_seqlen: int, rows: int) -> None:
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens[0] is {bounds[0]}: must be 0")
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if min(lengths, default=0) < 0:
        bad = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(f"cu_seqlens falls from {bounds[bad]} to {bounds[bad + 1]} at segment {bad}: must never fall")
    if bounds[-1] > rows:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, beyond the {rows} rows of q, k and v")
    if max_seqlen != max(lengths, default=0):
        raise ValueError(f"max_seqlen is {max_seqlen}, the longest segment has {max(lengths, default=0)} rows")
