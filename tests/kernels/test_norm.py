"""RMSNorm against the formula in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.norm import rms_norm
from tests.kernels.reference import leaves, relative_error

EPS = 1e-5


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([row / (row.pow(2).sum() / len(row) + EPS).sqrt() * weight for row in x])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)],
    ids=str,
)
def test_equals_the_formula(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(6, 48, generator=generator) * scale).to(dtype).requires_grad_()
    weight = (torch.rand(48, generator=generator) + 0.5).to(dtype).requires_grad_()
    dout = torch.randn(6, 48, generator=generator).to(dtype)
    out = rms_norm(x, weight, EPS)
    exact = leaves(x, weight)
    expected = reference(*exact)
    assert out.dtype == dtype
    assert relative_error(out, expected) <= tolerance
    gradients = torch.autograd.grad(out, (x, weight), dout)
    for got, want in zip(gradients, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert relative_error(got, want) <= tolerance


def test_squares_do_not_overflow_in_half_precision() -> None:
    x = torch.full((1, 4), 1000.0, dtype=torch.float16)  # 1000² is beyond float16
    assert torch.equal(rms_norm(x, torch.ones(4, dtype=torch.float16), EPS), torch.ones(1, 4, dtype=torch.float16))


def test_a_zero_row_is_zero() -> None:
    x = torch.zeros(1, 4, requires_grad=True)
    out = rms_norm(x, torch.ones(4), EPS)
    assert not out.any()
    assert torch.isfinite(torch.autograd.grad(out.sum(), x)[0]).all()


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = leaves(torch.randn(3, 5, generator=generator), torch.randn(5, generator=generator))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, EPS), (x, weight))


def test_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="must agree in the last dimension"):
        rms_norm(torch.ones(2, 4), torch.ones(1), EPS)
    with pytest.raises(ValueError, match=r"weight is torch\.float32, x is torch\.bfloat16"):
        rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4), EPS)
