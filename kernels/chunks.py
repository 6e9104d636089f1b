"""The linear layer and its cross entropy, chunk of rows by chunk of rows: logits, softmax and both gradients at once.

Three products a chunk, as many as with all logits in memory, of which there is one chunk. Takes only supervised rows.
The weight may be one member's slice of the vocabulary: `Merge` then makes one row's statistics of the members'.

Shapes: T rows, W width, V vocabulary, or a slice of it; n rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows at a time. Fewer make the products slow (64 rows: 0.7 of the rate of 256 on a CPU), more make the chunk large and
# leave the cache. With wider layers than this many a chunk of logits is smaller than the weight.
CHUNK_ROWS = 256

# Elements at a time where no product is made: in float32 they fit a CPU's cache.
CACHED_ELEMENTS = 1 << 18

# Statistics [3, n] of a slice -> of the whole vocabulary: each row's largest logit, sum of exp(logit − largest), and
# target's logit, which is 0 where another slice holds it.
Merge = Callable[[Tensor], Tensor]


def linear_sum(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of cross entropies of rows @ weightᵀ. rows [T, W], weight [V, W], targets [T] int64 in 0..V−1 -> [] of at
    least float32. Differentiable once in rows and weight."""
    return slice_sum(rows, weight, targets, merge=_alone)


def slice_sum(rows: Tensor, weight: Tensor, targets: Tensor, *, merge: Merge) -> Tensor:
    """`linear_sum` where weight is a slice of the vocabulary and targets are counted from its first row: those outside
    0..V−1 belong to another member. The gradient of rows is this slice's share."""
    enabled = torch.is_grad_enabled()  # not what needs_input_grad says under no_grad
    wanted = enabled and rows.requires_grad, enabled and weight.requires_grad
    total: Tensor = _SliceSum.apply(rows, weight, targets, wanted, merge)  # type: ignore[no-untyped-call]
    return total


class _SliceSum(torch.autograd.Function):
    """Makes the gradients of the sum with the sum. Every product writes into a given tensor, hence none is subject to
    autocast, which would round."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, wanted: tuple[bool, bool], merge: Merge
    ) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        losses = rows.new_empty(len(rows), dtype=wide)
        drows = torch.empty_like(rows) if wanted[0] else None
        dweight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        buffer = rows.new_empty(min(CHUNK_ROWS, len(rows)), len(weight))
        for chunk in _parts(len(rows), CHUNK_ROWS):
            logits = torch.mm(rows[chunk], weight.T, out=buffer[: len(rows[chunk])])
            losses[chunk] = _cross_entropy_(logits, targets[chunk], merge, gradient=any(wanted))
            if drows is not None:
                torch.mm(logits, weight, out=drows[chunk])
            if dweight is not None:
                _add_product_(dweight, logits.T, rows[chunk])
        ctx.save_for_backward(drows, dweight)
        ctx.nothing, ctx.dtype = len(rows) == 0, rows.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.nothing:  # 0 also where the caller divided by a count of 0
            dtotal = torch.zeros_like(dtotal)
        drows, dweight = (x if x is None else _scaled(x, dtotal, ctx.dtype) for x in ctx.saved_tensors)
        return drows, dweight, None, None, None


def _cross_entropy_(logits: Tensor, targets: Tensor, merge: Merge, *, gradient: bool) -> Tensor:
    """Losses [n] of logits [n, V], which become their gradient if that is wanted."""
    held = (targets >= 0) & (targets < logits.shape[1])
    places = targets.where(held, 0).unsqueeze(1)
    statistics = merge(_statistics(logits, places, held))
    if gradient and logits.shape[1]:
        _to_gradient_(logits, statistics, places, held)
    largest, total, target = statistics.unbind()
    return (largest - target) + total.log()


def _statistics(logits: Tensor, places: Tensor, held: Tensor) -> Tensor:
    """What is merged: [3, n], wide."""
    statistics = logits.new_zeros(3, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    if logits.shape[1] == 0:  # the slice of a member that holds no part of the vocabulary
        statistics[0] = -torch.inf
        return statistics
    statistics[0] = logits.amax(dim=1)
    statistics[2] = logits.gather(1, places).squeeze(1).where(held, 0.0)
    for rows in _parts(*_cached(logits)):
        statistics[1, rows] = (logits[rows] - statistics[0, rows].unsqueeze(1)).exp_().sum(dim=1)
    return statistics


def _to_gradient_(logits: Tensor, statistics: Tensor, places: Tensor, held: Tensor) -> None:
    """logits := softmax less 1 at the targets that this slice holds; wide until it is stored."""
    largest, total, _ = statistics.unsqueeze(2)
    ones = held.to(total.dtype).neg_().unsqueeze(1)
    for rows in _parts(*_cached(logits)):
        softmax = (logits[rows] - largest[rows]).exp_().div_(total[rows])
        logits[rows] = softmax.scatter_add_(1, places[rows], ones[rows])


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right. A total that is wider than the factors gets products of their dtype, some rows at a time:
    widening the factors would round less, not visibly so beside the factors' own rounding, at half the rate."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
        return
    count, size = _cached(total)
    product = right.new_empty(min(size, count), right.shape[1])
    for part in _parts(count, size):
        total[part] += torch.mm(left[part], right, out=product[: len(left[part])])


def _alone(statistics: Tensor) -> Tensor:
    return statistics


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient · factor in dtype. factor is wide, and so is the product until it is stored: rounded to dtype first, it
    would put all of the gradient out of scale. No wide copy is made of all of it."""
    if factor.dtype == dtype:
        return gradient * factor
    scaled = torch.empty_like(gradient, dtype=dtype)
    for rows in _parts(*_cached(gradient)):
        scaled[rows] = gradient[rows].to(factor.dtype) * factor
    return scaled


def _cached(matrix: Tensor) -> tuple[int, int]:
    """Its rows, and how many of them fit the cache."""
    return len(matrix), max(1, CACHED_ELEMENTS // max(1, matrix.shape[1]))


def _parts(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, size))
