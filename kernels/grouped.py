"""Linear layers of many groups at once: each row is multiplied by the matrix of its group, as in a mixture of experts.

On a GPU in bfloat16 torch's grouped matmul does it in one kernel, whatever the sizes of groups; anywhere else, in any
dtype, one matmul for each group that has rows. Both compute the same; no group is padded or cut. The kernel was not yet
run on a GPU; torch's stand-in for it on the CPU was.

Shapes: N rows, sorted by group; G groups, any of which may be empty; I and O width of input and output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

LIBRARY: Callable[..., Tensor] | None = getattr(functional, "grouped_mm", None)  # torch 2.10 and later
LIBRARY_CAPABILITY = (8, 0)  # of a GPU; on older ones torch does what is done here
LIBRARY_BYTES = 16  # rows of its operands must begin at multiples
LIBRARY_GROUPS = 1023


def grouped_linear(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """rows [N, I] @ weightsᵀ: the first counts[0] rows by weights[0], the next counts[1] by weights[1], and so on.

    weights [G, O, I] of the same dtype and device; counts: G numbers that sum to N, on the host, so that no device is
    waited for. -> [N, O]. Differentiable once; a group without rows has a gradient of zeros. Raises ValueError for what
    does not fit.
    """
    _check(rows, weights, counts)
    out: Tensor = _GroupedLinear.apply(rows, weights, tuple(counts))  # type: ignore[no-untyped-call]
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.counts = counts
        return _products(rows, weights.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        needs_rows, needs_weights, _ = ctx.needs_input_grad
        dout = dout.contiguous()
        drows = _products(dout, weights, ctx.counts) if needs_rows else None
        dweights = _outer_products(dout, rows, ctx.counts) if needs_weights else None
        return drows, dweights, None


def _products(rows: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows [N, I] of each group by its matrix: matrices [G, I, O] -> [N, O]."""
    if _library_takes(rows, matrices, len(counts)):
        return _products_by_library(rows, matrices, counts)
    out = rows.new_empty(len(rows), matrices.shape[2])
    for given, matrix, result in zip(_groups(rows, counts), matrices, _groups(out, counts), strict=True):
        if len(given):
            torch.mm(given, matrix, out=result)
    return out


def _outer_products(dout: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The gradient of weights: of each group doutᵀ [O, n] @ rows [n, I] -> [G, O, I]."""
    if _library_takes(rows, dout, len(counts)):
        return _outer_products_by_library(dout, rows, counts)
    out = rows.new_empty(len(counts), dout.shape[1], rows.shape[1])
    for left, right, result in zip(_groups(dout, counts), _groups(rows, counts), out, strict=True):
        torch.mm(left.T, right, out=result)  # zeros where there are no rows
    return out


def _products_by_library(rows: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    assert LIBRARY is not None
    return LIBRARY(rows, matrices, offs=_ends(counts, rows.device))


def _outer_products_by_library(dout: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    assert LIBRARY is not None
    out = LIBRARY(dout.T, rows, offs=_ends(counts, rows.device))
    for group, count in enumerate(counts):
        if not count:
            out[group].zero_()  # that it writes there is not promised
    return out


def _groups(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(rows, list(counts))


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)
    return (ends.pin_memory() if device.type == "cuda" else ends).to(device, non_blocking=True)


def _library_takes(rows: Tensor, other: Tensor, groups: int) -> bool:
    """Whether its fast kernel exists here and takes these operands."""
    return (
        LIBRARY is not None
        and rows.is_cuda
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= LIBRARY_CAPABILITY
        and len(rows) > 0
        and groups <= LIBRARY_GROUPS
        and all(_is_aligned(tensor) for tensor in (rows, other))
    )


def _is_aligned(tensor: Tensor) -> bool:
    """Rows, or columns, of consecutive elements, at aligned addresses."""
    strides = sorted(tensor.stride())
    apart = [stride * tensor.element_size() for stride in strides[1:]]
    return strides[0] == 1 and not any(each % LIBRARY_BYTES for each in (tensor.data_ptr(), *apart))


def _check(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> None:
    if rows.ndim != 2 or weights.ndim != 3 or rows.shape[1] != weights.shape[2]:
        raise ValueError(
            f"rows are {list(rows.shape)}, weights {list(weights.shape)}: must be [N, I] and [G, O, I] with one I"
        )
    if rows.dtype != weights.dtype or rows.device != weights.device:
        raise ValueError(
            f"rows are {rows.dtype} on {rows.device}, weights {weights.dtype} on {weights.device}: must be alike"
        )
    if len(counts) != len(weights) or min(counts, default=0) < 0 or sum(counts) != len(rows):
        raise ValueError(
            f"counts are {list(counts)}: must be {len(weights)} numbers from 0 that sum to {len(rows)}, the rows"
        )
