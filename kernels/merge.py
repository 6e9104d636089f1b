"""Joining attention over two disjoint sets of keys, from the outputs and log-sum-exps of each.

What rings and back ends that cut a row's keys apart add up with. Gradients need no such step: they are sums over calls
already, see `seqmesh.kernels.backends.base`.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of T rows over two disjoint sets of keys -> over both: (out [T, Hq, D], lse [Hq, T]).

    out_a, out_b [T, Hq, D] in any dtypes, lse_a, lse_b [Hq, T] in that of statistics, which the result has too. lse
    −inf marks a row that saw no key; its out must be finite and counts for nothing. FlashAttention 2 marks such rows
    with +inf, which is read as −inf. A row that saw none in either has out 0 and lse −inf again.

    The larger lse is taken out before exponentials, so no score overflows, and the weights add up to 1 even where the
    log-sum-exps are so large that their own rounding would spoil them. FlashAttention-2 (Dao 2023), section 3.1.
    """
    lse_a, lse_b = _unseen(lse_a), _unseen(lse_b)
    largest = torch.maximum(lse_a, lse_b)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)  # −inf − (−inf) is NaN
    weight_a, weight_b = (lse_a - largest).exp(), (lse_b - largest).exp()
    total = weight_a + weight_b
    share = total.masked_fill(total == 0, 1.0)
    return out_a * _per_row(weight_a / share) + out_b * _per_row(weight_b / share), largest + total.log()


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merge` into sums: out [T, Hq, D] and lse [Hq, T] are extended in place by part [T, Hq, D] and part_lse [Hq, T].

    out and lse have the dtype of statistics, part any; views will do. On a GPU with Triton, one kernel.
    """
    if out.is_cuda and out.dtype == torch.float32 and _has_triton():
        from seqmesh.kernels import triton_merge

        triton_merge.merge_(out, lse, part, part_lse)
        return
    whole, whole_lse = merge(out, lse, part, part_lse)
    out.copy_(whole)
    lse.copy_(whole_lse)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _unseen(lse: Tensor) -> Tensor:
    """lse with −inf, as everywhere here, where a library says +inf."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def _per_row(weight: Tensor) -> Tensor:
    """[Hq, T] -> [T, Hq, 1]."""
    return weight.transpose(0, 1).unsqueeze(-1)
