"""Attention inside the segments of a pack as PyTorch operators: traced as one call each, whatever the pack.

    seqmesh::attend_forward    seqmesh::attend_backward

Boundaries are a tensor, and the back end is chosen inside, so `torch.compile` makes one graph for all packs: nothing of
what differs between them is visible to it. The contract is that of `seqmesh.kernels.backends.base`. Rings are not known
here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from seqmesh.kernels.backends.base import Request, Rule, Segments, statistics_dtype
from seqmesh.kernels.backends.table import choose


@torch.library.custom_op("seqmesh::attend_forward", mutates_args=())
def attend_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int | None,
    scale: float,
    backend: str,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    """`base.BlockForward` by the back end of that name, differentiable in q, k and v. gradient: whether a backward pass
    may follow; a back end without one refuses then.

    Raises what `table.choose` raises, and ValueError for bounds that break the contract where they lie on the CPU: on a
    device reading them would make every call wait for it.
    """
    _check_bounds("q", cu_q, max_q, len(q))
    _check_bounds("k", cu_k, max_k, len(k))
    chosen = choose(backend, request_of(q, k, causal=causal, window=window, rings=False, gradient=gradient))
    segments, rule = Segments(cu_q, cu_k, max_q, max_k), Rule(causal, window, scale)
    out, lse = chosen.forward(q, k, v, segments, rule)
    return out.contiguous(), lse.contiguous()  # as the traced shapes promise


@torch.library.custom_op("seqmesh::attend_backward", mutates_args=())
def attend_backward(
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
    causal: bool,
    window: int | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`base.BlockBackward` by the back end of that name. Not differentiable."""
    chosen = choose(backend, request_of(q, k, causal=causal, window=window, rings=False, gradient=True))
    segments, rule = Segments(cu_q, cu_k, max_q, max_k), Rule(causal, window, scale)
    gradients = chosen.backward(dout, q, k, v, out, lse, segments, rule)
    dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv


def request_of(q: Tensor, k: Tensor, *, causal: bool, window: int | None, rings: bool, gradient: bool) -> Request:
    """What a call with these tensors asks of a back end."""
    return Request(
        device=q.device,
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        causal=causal,
        window=window,
        rings=rings,
        gradient=gradient,
    )


@attend_forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001 -- shapes follow from q alone
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=statistics_dtype(q.dtype))


@attend_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.settings, _gradient = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG001
    gradients = attend_backward(dout, *ctx.saved_tensors, *ctx.settings)
    return *gradients, *[None] * 9


attend_forward.register_autograd(_differentiate, setup_context=_save)


def _check_bounds(name: str, cu: Tensor, longest: int, rows: int) -> None:
    """Raise ValueError for cumulative lengths on the CPU that are no partition of the first of `rows` rows."""
    if cu.device.type != "cpu":
        return
    bounds = cu.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens[0] is {bounds[0]}: must be 0")
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if min(lengths, default=0) < 0:
        bad = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(f"cu_seqlens falls from {bounds[bad]} to {bounds[bad + 1]} at segment {bad}: must never fall")
    if bounds[-1] > rows:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, beyond the {rows} rows of {name}")
    if longest < max(lengths, default=0):
        raise ValueError(f"max_seqlen is {longest}, the longest segment has {max(lengths)} rows")
