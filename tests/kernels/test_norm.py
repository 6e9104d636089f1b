"""Norms against their formulas in float64, forward and backward, alone and with a residual sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tests.kernels.reference import leaves, relative_error

EPS = 1e-5


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([row / (row.pow(2).sum() / len(row) + EPS).sqrt() * weight for row in x])


def layer_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = []
    for row in x:
        centred = row - row.sum() / len(row)
        rows.append(centred / (centred.pow(2).sum() / len(row) + EPS).sqrt() * weight)
    return torch.stack(rows) if bias is None else torch.stack(rows) + bias


TOLERANCES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)],
    ids=str,
)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e3])
@TOLERANCES
def test_layer_norm_equals_the_formula(dtype: torch.dtype, tolerance: float, scale: float, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = ((torch.randn(6, 48, generator=generator) + 1) * scale).to(dtype).requires_grad_()
    parameters = [torch.rand(48, generator=generator).to(dtype).requires_grad_() for _ in range(1 + with_bias)]
    dout = torch.randn(6, 48, generator=generator).to(dtype)
    out = layer_norm(x, parameters[0], parameters[1] if with_bias else None, EPS)
    exact = leaves(x, *parameters)
    expected = layer_reference(*exact)
    assert out.dtype == dtype
    assert relative_error(out, expected) <= tolerance
    gradients = torch.autograd.grad(out, (x, *parameters), dout)
    for got, want in zip(gradients, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert relative_error(got, want) <= 4 * tolerance


def test_with_a_residual_the_sum_is_given_too() -> None:
    """Gradients come back through the norm and through the sum."""
    generator = torch.Generator().manual_seed(3)
    x, residual, dnormed, dtotal = torch.randn(4, 5, 8, generator=generator, dtype=torch.float64)
    weight, bias = torch.rand(2, 8, generator=generator, dtype=torch.float64)
    for with_bias in (False, True):
        given, exact = leaves(x, residual, weight, bias), leaves(x, residual, weight, bias)
        expected_total = exact[0] + exact[1]
        if with_bias:
            expected = layer_reference(expected_total, exact[2], exact[3])
            normed, total = add_layer_norm(given[0], given[1], given[2], given[3], EPS)
        else:
            expected = reference(expected_total, exact[2])
            normed, total = add_rms_norm(given[0], given[1], given[2], EPS)
        torch.testing.assert_close(normed, expected, rtol=0, atol=1e-13)
        assert torch.equal(total, expected_total)
        pair = [
            torch.autograd.grad(outputs, inputs, (dnormed, dtotal), allow_unused=True, materialize_grads=True)
            for outputs, inputs in (((normed, total), given), ((expected, expected_total), exact))
        ]
        for a, b in zip(*pair, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@TOLERANCES
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
    with pytest.raises(ValueError, match=r"bias is \[3\], x is \[2, 4\]: must agree in the last dimension"):
        layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(3), EPS)
    with pytest.raises(ValueError, match=r"residual is torch\.float32 \[4\], x is torch\.float32 \[2, 4\]"):
        add_rms_norm(torch.ones(2, 4), torch.ones(4), torch.ones(4), EPS)
