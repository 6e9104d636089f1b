"""Root mean square normalisation (Zhang and Sennrich 2019) and layer normalisation, alone or with a residual sum.

torch's own routines: on the CPU they give the same numbers as the formulas written out, in the same time, and on CUDA
each is one fused kernel. `fuse.compiled` makes one pass of each over memory, on the CPU too.

Statistics and products are float32 for narrower inputs, float64 for float64, and rounded once at the end. Shapes:
[..., W] with width W, over which is normalised.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight. x [..., W], weight [W] -> [..., W] in x's dtype.

    Raises ValueError where weight is not [W] or has another dtype than x: mixed, torch warns and leaves its fused path.
    """
    _check("weight", weight, x)
    return functional.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias, var the mean square deviation. x [..., W], weight and bias
    [W] (None for none) -> [..., W] in x's dtype. Raises ValueError like `rms_norm`, of the bias, too."""
    _check("weight", weight, x)
    if bias is not None:
        _check("bias", bias, x)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the norm that a block begins with, and what it adds to. x and residual
    [..., W] of one dtype. Raises ValueError where they differ."""
    total = _added(x, residual)
    return rms_norm(total, weight, eps), total


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual); like `add_rms_norm`."""
    total = _added(x, residual)
    return layer_norm(total, weight, bias, eps), total


def _added(x: Tensor, residual: Tensor) -> Tensor:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        given = f"residual is {residual.dtype} {list(residual.shape)}, x is {x.dtype} {list(x.shape)}"
        raise ValueError(f"{given}: must have one shape and dtype")
    return x + residual


def _check(name: str, parameter: Tensor, x: Tensor) -> None:
    if parameter.shape != x.shape[-1:]:
        raise ValueError(f"{name} is {list(parameter.shape)}, x is {list(x.shape)}: must agree in the last dimension")
    if parameter.dtype != x.dtype:
        raise ValueError(f"{name} is {parameter.dtype}, x is {x.dtype}: must be equal")
