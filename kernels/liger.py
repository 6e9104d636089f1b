"""Liger's fused linear cross entropy (Hsu et al. 2024), where it is installed and tensors are on CUDA.

Written against the signature of 0.8.5, recorded in the tests. What it is asked for, and why:

* a sum, never one loss a row: it makes gradients in forward, summed over rows, and scales them in backward, which a
  weight of each row comes too late for (wrong silently up to 0.8.0);
* supervised rows only: their logits' gradient of 0 times a NaN would put NaN into the weight's gradient;
* the weight's gradient summed in float32: by default it is rounded to the weight's dtype at every chunk.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from seqmesh.kernels import chunks

ARGUMENTS: dict[str, Any] = {"reduction": "sum", "accum_dtype": torch.float32}  # besides input, weight and target


def refusal(rows: Tensor) -> str | None:
    """Why it cannot take these rows, or None. Imports nothing."""
    if rows.device.type != "cuda":
        return f"tensors are on {rows.device.type}, liger runs on cuda"
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype is {rows.dtype}, liger computes in float32"
    return None if find_spec("liger_kernel") else "liger_kernel is not installed"


def linear_sum(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`chunks.linear_sum` by Liger. Backward runs once: it scales the gradients in place."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if len(rows) == 0:
        return chunks.linear_sum(rows, weight, targets)  # it divides by the number of rows
    if not torch.is_grad_enabled():
        rows, weight = rows.detach(), weight.detach()  # it would make their gradients all the same
    elif weight.requires_grad and not rows.requires_grad:
        rows = rows.detach().requires_grad_()  # else it makes no gradient, not even the weight's
    total: Tensor = liger_fused_linear_cross_entropy(input=rows, weight=weight, target=targets, **ARGUMENTS)
    return total
