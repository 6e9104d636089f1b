"""The two ends of a tensor-parallel block: every rank of a group gets the whole input, and their outputs are summed.

A parallel block is `x + sum_partials(attention(n) + mlp(n), bias, group)`, n = `share_input(norm(x), group)`: query
heads and MLP width are divided over the group, and there is one all-reduce forward and one backward. What every rank
holds whole, a bias of the output or the residual, is added after the sum: before it, it is added once per rank.

Shapes: [..., W] with width W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks that divide a layer: `rank` of `count`; None of them for one, which sends nothing. chunks: that an
    exchange is cut into, to overlap with the matmuls at its ends."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    count: int = 1
    chunks: int = 1


def sum_partials(partial: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Sum of the members' partial results, plus bias, once. partial [..., W], bias [W] (the same on all members, None
    for none) -> [..., W], the same on all members.

    One all-reduce, in partial's dtype. Backward communicates nothing: the output's gradient, whole on every member, is
    the partial's, and its sum over rows the bias's. Every member's bias thus has the whole gradient; do not sum it over
    the group. Raises ValueError for a bias that does not fit.
    """
    if bias is not None and (bias.shape != partial.shape[-1:] or bias.dtype != partial.dtype):
        given = f"bias is {bias.dtype} {list(bias.shape)}, partial {partial.dtype} {list(partial.shape)}"
        raise ValueError(f"{given}: bias must be [W] of the same dtype")
    total: Tensor = _SumPartials.apply(partial, group)  # type: ignore[no-untyped-call]
    return total if bias is None else total + bias


def share_input(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, the same on all members, as the input of what is divided over them: backward sums the members' gradients of
    it by one all-reduce, in x's dtype."""
    shared: Tensor = _ShareInput.apply(x, group)  # type: ignore[no-untyped-call]
    return shared


class _SumPartials(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004 -- autograd's
        return _summed(partial, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return dout, None


class _ShareInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return _summed(dx, ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group, in a tensor of its own."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
