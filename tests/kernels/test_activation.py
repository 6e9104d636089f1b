"""GELU and the gated activations against their formulas in float64, and what they keep until backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.activation import geglu, gelu, swiglu
from tests.kernels.reference import leaves, relative_error

TOLERANCES = [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
Gated = Callable[[Tensor, Tensor], Tensor]


def normal_gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def tanh_gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


GATED: dict[str, tuple[Gated, Gated]] = {
    "swiglu": (swiglu, lambda gate, up: gate / (1 + torch.exp(-gate)) * up),
    "geglu": (geglu, lambda gate, up: normal_gelu(gate) * up),
    "geglu tanh": (lambda gate, up: geglu(gate, up, tanh=True), lambda gate, up: tanh_gelu(gate) * up),
    "gelu": (lambda gate, up: gelu(gate) + 0 * up, lambda gate, up: normal_gelu(gate) + 0 * up),
    "gelu tanh": (lambda gate, up: gelu(gate, tanh=True) + 0 * up, lambda gate, up: tanh_gelu(gate) + 0 * up),
}


def pair(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 17, generator=generator).mul(3).to(dtype).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
def test_equals_the_formula(name: str, dtype: torch.dtype, tolerance: float) -> None:
    function, formula = GATED[name]
    given = pair(dtype)
    dout = torch.randn(6, 17, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, exact = function(*given), leaves(*given)
    expected = formula(*exact)
    assert out.dtype == dtype
    assert relative_error(out, expected) <= tolerance
    got, want = torch.autograd.grad(out, given, dout), torch.autograd.grad(expected, exact, dout.double())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) <= tolerance


@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu tanh"])
def test_gated_pairs_keep_only_their_inputs(name: str) -> None:
    kept: list[Tensor] = []
    gate, up = pair(torch.float32)

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        GATED[name][0](gate, up)
    assert {x.data_ptr() for x in kept} == {gate.data_ptr(), up.data_ptr()}
    assert torch.autograd.gradcheck(GATED[name][0], leaves(gate, up))


def test_far_out_they_neither_overflow_nor_give_nan() -> None:
    gate = torch.tensor([-1e4, 1e4], requires_grad=True)
    up = torch.ones(2, requires_grad=True)
    for function in (swiglu, geglu):
        out = function(gate, up)
        assert out.tolist() == [0.0, 1e4]
        dgate, dup = torch.autograd.grad(out.sum(), (gate, up))
        assert (dgate.tolist(), dup.tolist()) == ([0.0, 1.0], [0.0, 1e4])


def test_inputs_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gate is torch\.float32 \[2, 4\], up torch\.float32 \[4\]: must have one"):
        swiglu(torch.ones(2, 4), torch.ones(4))
    with pytest.raises(ValueError, match=r"up torch\.bfloat16 \[4\]: must have one shape and dtype"):
        geglu(torch.ones(4), torch.ones(4, dtype=torch.bfloat16))
