"""Tensor and sequence parallelism: layers are divided over peers, and between them each peer holds a part of the rows.

What divides a layer begins with one gather and ends with one reduce-scatter: `gather_linear` gives all rows to matrices
of which every peer has some rows, and `sum_linear` takes the sum over peers of products of matrices of which every peer
has some columns, each peer its own rows of it. Backward, the same two are made the other way round. A parallel block is
`x + sum_linear(attention, mlp of gather_linear(norm(x)))`: two exchanges forward, two backward. What every peer has
whole, a bias or the residual, is added after the sum: before it, it would be added once a peer.

Exchanges are cut into chunks of rows, of which one is computed with while the next one is under way (MegaScale). Rows
of a chunk are consecutive, and each peer has one stretch of every chunk, so that gathered chunks lie in order and
nothing is copied. None is under way any more when a function returns, so that exchanges of other groups never meet
these. On CUDA they run on a stream of the group's own; not yet run on a GPU.

Shapes: P packed rows, a multiple of peers · chunks; R = P / peers rows of one peer; W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Matrix = tuple[Tensor, Tensor | None]
"""Weight [n, W] and bias [n] of a linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks that divide a layer: `rank` of `count`, of `group`, None for that of all ranks; one of one sends
    nothing. chunks: that an exchange is cut into, to overlap with the matmuls at its ends."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    count: int = 1
    chunks: int = 1

    def rows(self, packed: int) -> int:
        """R for so many packed rows, once they are padded to P."""
        return -(-packed // (self.count * self.chunks)) * self.chunks if self.count > 1 else packed


ALONE = Peers()


def gather_linear(x: Tensor, matrices: Sequence[Matrix], peers: Peers, *, rows: bool = False) -> list[Tensor]:
    """All peers' rows times this peer's matrices: x [R, W] -> [P, n] of each, and last, if wanted, the gathered rows
    [P, W] themselves.

    One gather forward; backward one reduce-scatter of x's gradient, summed over peers and over all results. The
    gathered rows are kept for it, and not sent again. Raises ValueError where R is no multiple of the chunks.
    """
    weights, biases = [weight for weight, _ in matrices], [bias for _, bias in matrices]
    return list(_GatherLinear.apply(x, peers, rows, len(weights), *weights, *biases))  # type: ignore[no-untyped-call]


def sum_linear(
    factors: Sequence[Tensor], weights: Sequence[Tensor], peers: Peers, *, partial: Tensor | None = None
) -> Tensor:
    """This peer's rows of the sum, over peers and over factors, of factor [P, k] @ weightᵀ [k, W], and of `partial`
    [P, W] -> [R, W].

    One reduce-scatter forward; backward one gather of the result's gradient.
    """
    total: Tensor = _SumLinear.apply(peers, partial, len(weights), *factors, *weights)  # type: ignore[no-untyped-call]
    return total


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, peers: Peers, rows: bool, count: int, *matrices: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights = [weight for weight in matrices[:count] if weight is not None]
        biases = matrices[count:]
        gathered = x.new_empty(len(x) * peers.count, x.shape[1])
        outs = [x.new_empty(len(gathered), len(weight)) for weight in weights]
        for chunk in _gathering(x.contiguous(), gathered, peers):
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                _linear_(out[chunk], gathered[chunk], weight, bias)
        ctx.save_for_backward(gathered, *weights)
        ctx.peers, ctx.rows, ctx.biased = peers, rows, [bias is not None for bias in biases]
        return (*outs, gathered) if rows else tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        gathered, *weights = ctx.saved_tensors
        peers, drows, douts = ctx.peers, douts[-1] if ctx.rows else None, douts[: len(weights)]
        dgathered, dx = torch.empty_like(gathered), gathered.new_empty(len(gathered) // peers.count, gathered.shape[1])
        sent = []
        for own, rows in _chunks(dx, peers):
            start = None if drows is None else drows[rows]
            _products_(dgathered[rows], [dout[rows] for dout in douts], weights, start)
            sent.append(_begin(_reduce_scatter, dx[own], dgathered[rows], peers))
        dweights = [dout.T @ gathered for dout in douts]
        dbiases = [dout.sum(dim=0) if biased else None for dout, biased in zip(douts, ctx.biased, strict=True)]
        for wait in sent:
            wait()
        return dx, None, None, None, *dweights, *dbiases


class _SumLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, partial: Tensor | None, count: int, *tensors: Tensor) -> Tensor:
        factors, weights = tensors[:count], tensors[count:]
        like = next(each for each in (partial, *factors) if each is not None)
        width = like.shape[1] if partial is not None else len(weights[0])
        products, total = like.new_empty(len(like), width), like.new_empty(len(like) // peers.count, width)
        transposed, sent = [weight.T for weight in weights], []
        for own, rows in _chunks(total, peers):
            start = None if partial is None else partial[rows]
            _products_(products[rows], [factor[rows] for factor in factors], transposed, start)
            sent.append(_begin(_reduce_scatter, total[own], products[rows], peers))
        ctx.save_for_backward(*tensors)
        ctx.peers, ctx.partial = peers, partial is not None
        for wait in sent:
            wait()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        factors, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        gathered = dout.new_empty(len(dout) * ctx.peers.count, dout.shape[1])
        dfactors = [torch.empty_like(factor) for factor in factors]
        for chunk in _gathering(dout.contiguous(), gathered, ctx.peers):
            for dfactor, weight in zip(dfactors, weights, strict=True):
                torch.mm(gathered[chunk], weight, out=dfactor[chunk])
        dweights = [gathered.T @ factor for factor in factors]
        return None, gathered if ctx.partial else None, None, *dfactors, *dweights


def _linear_(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _products_(out: Tensor, factors: Sequence[Tensor], matrices: Sequence[Tensor], start: Tensor | None) -> None:
    """out := start + the sum of factor @ matrix."""
    pairs = list(zip(factors, matrices, strict=True))
    if start is None:
        torch.mm(*pairs.pop(0), out=out)
    elif pairs:
        torch.addmm(start, *pairs.pop(0), out=out)
    else:
        out.copy_(start)
    for factor, matrix in pairs:
        out.addmm_(factor, matrix)


def _gathering(x: Tensor, gathered: Tensor, peers: Peers) -> Iterator[slice]:
    """Send all chunks of x [R, W]; the rows of each in `gathered` [P, W], as soon as it is there."""
    sent = [(rows, _begin(_all_gather, gathered[rows], x[own], peers)) for own, rows in _chunks(x, peers)]
    for rows, wait in sent:
        wait()
        yield rows


def _begin(exchange: Callable[..., Any], out: Tensor, values: Tensor, peers: Peers) -> Callable[[], object]:
    """Begin an exchange; what waits for its end. On the meta device, where memory is counted, nothing is sent."""
    if out.is_meta:
        return _nothing
    wait: Callable[[], object] = exchange(out, values, group=peers.group, async_op=True).wait
    return wait


def _nothing() -> None:
    pass


def _chunks(own: Tensor, peers: Peers) -> list[tuple[slice, slice]]:
    """Of each chunk the rows among this peer's own [R, W], and those among all packed rows. Raises ValueError where
    they do not come out even: some would be left as they were."""
    size, left = divmod(len(own), peers.chunks)
    if left:
        raise ValueError(f"{len(own)} rows of a peer: must be a multiple of the chunks, {peers.chunks}")
    return [
        (slice(size * i, size * (i + 1)), slice(size * i * peers.count, size * (i + 1) * peers.count))
        for i in range(peers.chunks)
    ]


# As they are called from torch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
