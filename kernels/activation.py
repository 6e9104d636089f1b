"""Activations of an MLP: GELU, and the gated pairs SwiGLU and GeGLU (Shazeer 2020) that keep only their inputs.

Written out, silu(gate) · up keeps gate, up and silu(gate) until backward; here the third is made again there, which the
tensors that need not be allocated pay for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

aten = torch.ops.aten


def gelu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """x · Φ(x), any shape, in x's dtype; with tanh by the approximation of GPT-2. torch's own, which keeps only x."""
    return functional.gelu(x, approximate=_form(tanh))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, both of one shape and dtype. Differentiable once. Raises ValueError where they differ."""
    return _gated(gate, up, None)


def geglu(gate: Tensor, up: Tensor, *, tanh: bool = False) -> Tensor:
    """gelu(gate) · up, both of one shape and dtype. Differentiable once. Raises ValueError where they differ."""
    return _gated(gate, up, _form(tanh))


def _gated(gate: Tensor, up: Tensor, form: str | None) -> Tensor:
    _check(gate, up)
    if torch.compiler.is_compiling():  # the compiler decides by itself what to keep and what to make again
        return _activate(gate, form) * up
    out: Tensor = _Gated.apply(gate, up, form)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    """form: None for SiLU, else of GELU."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, form: str | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.form = form
        return _activate(gate, form).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate = _activate_backward_(dout * up, gate, ctx.form)
        return dgate, _activate(gate, ctx.form).mul_(dout), None


def _activate(gate: Tensor, form: str | None) -> Tensor:
    return functional.silu(gate) if form is None else functional.gelu(gate, approximate=form)


def _activate_backward_(dout: Tensor, gate: Tensor, form: str | None) -> Tensor:
    """The gradient of gate, in place of dout."""
    if form is None:
        aten.silu_backward(dout, gate, grad_input=dout)
    else:
        aten.gelu_backward(dout, gate, approximate=form, grad_input=dout)
    return dout


def _form(tanh: bool) -> str:
    return "tanh" if tanh else "none"


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        given = f"gate is {gate.dtype} {list(gate.shape)}, up {up.dtype} {list(up.shape)}"
        raise ValueError(f"{given}: must have one shape and dtype")
