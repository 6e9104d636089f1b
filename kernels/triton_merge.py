"""`seqmesh.kernels.merge.merge_` as one Triton kernel: every output is read and written once.

In torch the same takes five passes over the outputs. No library has it: theirs join outputs that they have just made
themselves. Needs `triton` to be imported; on a GPU not yet run, checked in Triton's interpreter.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

triton = importlib.import_module("triton")  # untyped, and not in every installation
tl = importlib.import_module("triton.language")
constexpr = int  # Triton goes by the name

ROWS = 16  # of a program; its tile of outputs is ROWS · D


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """See `seqmesh.kernels.merge.merge_`; all on one CUDA device."""
    rows, heads, width = out.shape
    if not out.numel():
        return
    strides = (*out.stride(), *lse.stride(), *part.stride(), *part_lse.stride())
    grid = (triton.cdiv(rows, ROWS), heads)
    _kernel[grid](
        out, lse, part, part_lse, rows, width, *strides, ROWS=ROWS, WIDTH=triton.next_power_of_2(width)
    )  # fmt: skip


def _merge_rows(
    out: Any, lse: Any, part: Any, part_lse: Any, rows: Any, width: Any,
    out_row: Any, out_head: Any, out_column: Any, lse_head: Any, lse_row: Any,
    part_row: Any, part_head: Any, part_column: Any, part_lse_head: Any, part_lse_row: Any,
    ROWS: constexpr, WIDTH: constexpr,
) -> None:  # fmt: skip
    """ROWS rows of one head. Offsets are 64-bit: T · Hq · D may be more than 2³¹."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = row < rows
    tile = inside[:, None] & (column < width)

    lse_at = lse + head * lse_head + row * lse_row
    a = tl.load(lse_at, mask=inside, other=-float("inf"))
    b = tl.load(part_lse + head * part_lse_head + row * part_lse_row, mask=inside, other=-float("inf"))
    a = tl.where(a == float("inf"), -float("inf"), a)
    b = tl.where(b == float("inf"), -float("inf"), b)
    largest = tl.maximum(a, b)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(a - largest), tl.exp(b - largest)
    total = weight_a + weight_b
    share = tl.where(total == 0.0, 1.0, total)
    tl.store(lse_at, largest + tl.log(total), mask=inside)

    out_at = out + head * out_head + row[:, None] * out_row + column * out_column
    part_at = part + head * part_head + row[:, None] * part_row + column * part_column
    x = tl.load(out_at, mask=tile, other=0.0) * (weight_a / share)[:, None]
    y = tl.load(part_at, mask=tile, other=0.0).to(tl.float32) * (weight_b / share)[:, None]
    tl.store(out_at, x + y, mask=tile)


_kernel = triton.jit(_merge_rows)
