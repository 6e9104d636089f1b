"""Cross entropy as sum and count: exact, additive over parts, and silent about nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqmesh.kernels import loss
from seqmesh.kernels.loss import UNSUPERVISED, cross_entropy_sum
from tests.kernels.reference import leaves, relative_error


def reference(logits: Tensor, labels: list[int]) -> Tensor:
    """Plain loop in the dtype of logits."""
    total = logits.new_zeros(())
    for row, label in enumerate(labels):
        if label != UNSUPERVISED:
            total = total + logits[row].exp().sum().log() - logits[row, label]
    return total


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.one_of(st.just(UNSUPERVISED), st.integers(0, 6)), max_size=20),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    label_dtype=st.sampled_from([torch.int32, torch.int64]),
    chunk=st.sampled_from([1, 20, 1 << 18]),
)
def test_equals_a_plain_loop(labels: list[int], dtype: torch.dtype, label_dtype: torch.dtype, chunk: int) -> None:
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 5e-3}[dtype]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(labels), 7, generator=generator).to(dtype).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CHUNK_ELEMENTS", chunk)
        total, count = cross_entropy_sum(logits, torch.tensor(labels, dtype=label_dtype))
        (gradient,) = torch.autograd.grad(total * 0.3, logits)
    (exact,) = leaves(logits)
    expected = reference(exact, labels)
    assert int(count) == sum(label != UNSUPERVISED for label in labels)
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    assert relative_error(total, expected) <= 2e-6 if dtype != torch.float64 else 1e-13
    assert gradient.dtype == dtype
    if int(count):
        assert relative_error(gradient, torch.autograd.grad(expected * 0.3, exact)[0]) <= tolerance


def test_low_precision_gradients_are_rounded_once() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(2)).bfloat16()
    labels = torch.arange(50) % 7

    def gradient(rows: Tensor) -> Tensor:
        rows = rows.requires_grad_()
        return torch.autograd.grad(cross_entropy_sum(rows, labels)[0], rows)[0]

    assert torch.equal(gradient(logits), gradient(logits.float()).bfloat16())


def test_gradcheck() -> None:
    logits = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = torch.tensor([4, UNSUPERVISED, 0, 0])
    assert torch.autograd.gradcheck(lambda rows: cross_entropy_sum(rows, labels)[0], logits)


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_supervised_is_exactly_zero(rows: int) -> None:
    logits = torch.full((rows, 5), math.nan, requires_grad=True)
    total, count = cross_entropy_sum(logits, torch.full((rows,), UNSUPERVISED))
    (gradient,) = torch.autograd.grad(total, logits)
    assert (float(total.detach()), int(count)) == (0.0, 0)
    assert torch.equal(gradient, torch.zeros(rows, 5))


def test_unsupervised_rows_cannot_spoil_the_rest() -> None:
    logits = torch.zeros(3, 5)
    logits[1] = math.nan
    logits.requires_grad_()
    total, _ = cross_entropy_sum(logits, torch.tensor([0, UNSUPERVISED, 1]))
    (gradient,) = torch.autograd.grad(total, logits)
    assert float(total.detach()) == pytest.approx(2 * math.log(5))
    assert torch.isfinite(gradient).all()
    assert not gradient[1].any()


def test_huge_logits_do_not_overflow() -> None:
    total, _ = cross_entropy_sum(torch.tensor([[1e4, 0.0], [-1e4, -1e4]]), torch.tensor([1, 0]))
    assert float(total) == pytest.approx(1e4 + math.log(2))


def test_parts_of_a_step_add_up() -> None:
    """5 tokens at loss 1 here and 1 token at loss 7 there is 2.0 a token; the mean of the two means would be 4.0."""

    def rows_with_loss(value: float, rows: int) -> tuple[Tensor, Tensor]:
        # Two classes, the label's logit 0, the other's ln(e^value − 1): the loss is ln(1 + e^value − 1) = value.
        logits = torch.tensor([[0.0, math.log(math.expm1(value))]], dtype=torch.float64).repeat(rows, 1)
        return cross_entropy_sum(logits, torch.zeros(rows, dtype=torch.int32))

    nothing = cross_entropy_sum(torch.zeros(4, 2, dtype=torch.float64), torch.full((4,), UNSUPERVISED))
    for parts, mean in (((1.0, 5), (7.0, 1)), 2.0), (((1.0, 3), (5.0, 1)), 2.0), (((1.0, 4),), 1.0):
        pairs = [rows_with_loss(value, rows) for value, rows in parts] + [nothing]
        total, count = (torch.stack([pair[i] for pair in pairs]).sum() for i in range(2))
        assert float(total / count) == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("bad", [7, -1, -99, -101, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_labels_out_of_range_are_refused_with_their_row(bad: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"labels\[2\] is {bad}: must be -100 or from 0 to 6"):
        cross_entropy_sum(torch.zeros(4, 7), torch.tensor([0, UNSUPERVISED, bad, 6], dtype=dtype))


def test_tensors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[T, V\] and \[T\]"):
        cross_entropy_sum(torch.zeros(4, 7), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"labels is torch\.int16: must be int32 or int64"):
        cross_entropy_sum(torch.zeros(4, 7), torch.zeros(4, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"logits is torch\.int64: must be floating point"):
        cross_entropy_sum(torch.zeros(4, 7, dtype=torch.int64), torch.zeros(4, dtype=torch.int32))
