"""The loss of a linear layer in chunks: the float64 formula's values and gradients, and little memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from seqmesh.kernels import chunks
from seqmesh.kernels.loss import UNSUPERVISED, cross_entropy_sum, linear_cross_entropy_sum
from tests.kernels.reference import leaves, relative_error

VOCABULARY, WIDTH = 7, 5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def reference(hidden: Tensor, weight: Tensor, labels: list[int]) -> Tensor:
    """A plain loop in float64 over rows that have a label."""
    total = (hidden[:0].sum() + weight.sum()) * 0.0
    for row, label in enumerate(labels):
        if label != UNSUPERVISED:
            logits = torch.stack([(weight[v] * hidden[row]).sum() for v in range(len(weight))])
            total = total + logits.exp().sum().log() - logits[label]
    return total


def inputs(rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    return hidden, torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)


def gradients(loss: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor) -> list[Tensor]:
    """The loss and its gradients in both."""
    both = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    total = loss(*both)
    return [total.detach(), *torch.autograd.grad(total * 0.3, both)]


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.one_of(st.just(UNSUPERVISED), st.integers(0, VOCABULARY - 1)), max_size=20),
    dtype=st.sampled_from(list(TOLERANCE)),
    label_dtype=st.sampled_from([torch.int32, torch.int64]),
    chunk=st.sampled_from([1, 3, 256]),
    cached=st.sampled_from([1, 15, 1 << 18]),
    beyond=st.sampled_from([0.0, math.nan, math.inf]),
)
def test_equals_a_plain_loop(
    labels: list[int], dtype: torch.dtype, label_dtype: torch.dtype, chunk: int, cached: int, beyond: float
) -> None:
    hidden, weight = inputs(len(labels), dtype)
    ids = torch.tensor(labels, dtype=label_dtype)
    hidden[ids == UNSUPERVISED] = beyond  # whatever these rows hold
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_ROWS", chunk)
        patch.setattr(chunks, "CACHED_ELEMENTS", cached)
        _, count = linear_cross_entropy_sum(hidden, weight, ids)
        total, dhidden, dweight = gradients(lambda h, w: linear_cross_entropy_sum(h, w, ids)[0], hidden, weight)
    exact = leaves(hidden.where((ids != UNSUPERVISED).unsqueeze(1), 0.0), weight)
    expected = reference(exact[0], exact[1], labels)
    want = torch.autograd.grad(expected * 0.3, exact, allow_unused=True, materialize_grads=True)
    assert int(count) == sum(label != UNSUPERVISED for label in labels)
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    assert (dhidden.dtype, dweight.dtype) == (dtype, dtype)
    assert relative_error(total, expected) <= TOLERANCE[dtype]
    assert relative_error(dhidden, want[0]) <= TOLERANCE[dtype]
    assert relative_error(dweight, want[1]) <= TOLERANCE[dtype]
    assert not dhidden[ids == UNSUPERVISED].any()


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_supervised_is_exactly_zero(rows: int) -> None:
    """Also where the caller divides by its count of 0: NaN there is the caller's, none of it reaches a weight."""
    hidden, weight = torch.full((rows, WIDTH), math.nan, requires_grad=True), torch.ones(VOCABULARY, WIDTH)
    weight.requires_grad_()
    total, count = linear_cross_entropy_sum(hidden, weight, torch.full((rows,), UNSUPERVISED))
    assert (float(total.detach()), int(count)) == (0.0, 0)
    for divided in (total, total / count):
        for gradient in torch.autograd.grad(divided, (hidden, weight), retain_graph=True):
            assert torch.equal(gradient, torch.zeros_like(gradient))


def test_gradcheck_and_a_second_backward() -> None:
    hidden, weight = leaves(*inputs(5, torch.float64))
    labels = torch.tensor([4, UNSUPERVISED, 0, 0, 6])
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy_sum(h, w, labels)[0], (hidden, weight))
    total, _ = linear_cross_entropy_sum(hidden, weight, labels)
    first, second = (torch.autograd.grad(total * 0.3, (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_wanted_gradients_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products where both are wanted, not the four that logits made a second time would take."""
    products: list[str] = []

    def counted(name: str, product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Tensor, **keywords: Tensor) -> Tensor:
            products.append(name)
            return product(*arguments, **keywords)

        return call

    monkeypatch.setattr(torch, "mm", counted("mm", torch.mm))
    monkeypatch.setattr(torch.Tensor, "addmm_", counted("addmm_", torch.Tensor.addmm_))
    labels = torch.tensor([0, 6, 3])
    for of_hidden, of_weight in ((True, True), (True, False), (False, True), (False, False)):
        hidden, weight = inputs(3, torch.float32)
        hidden.requires_grad_(of_hidden), weight.requires_grad_(of_weight)
        products.clear()
        total, _ = linear_cross_entropy_sum(hidden, weight, labels)
        assert len(products) == 1 + of_hidden + of_weight
        products.clear()
        with torch.no_grad():
            alone, _ = linear_cross_entropy_sum(hidden, weight, labels)
        assert len(products) == 1
        assert torch.equal(alone, total)
        if of_hidden or of_weight:
            made = torch.autograd.grad(total, [x for x in (hidden, weight) if x.requires_grad])
            assert len(made) == of_hidden + of_weight
            assert len(products) == 1


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_bfloat16_is_nearer_to_the_truth_than_with_all_logits(offset: float) -> None:
    """3,000 rows in a dozen chunks, against the plain bfloat16 formula: its loss is off by 2e-3, ours by 2e-5."""
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(3_000, 64, generator=generator) + offset).bfloat16()
    weight = (torch.randn(500, 64, generator=generator) * 0.1).bfloat16()
    labels = torch.randint(0, 500, (3_000,), generator=generator)

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")

    truth = gradients(plain, hidden.double(), weight.double())
    theirs = gradients(plain, hidden, weight)
    ours = gradients(lambda h, w: linear_cross_entropy_sum(h, w, labels)[0], hidden, weight)
    for got, other, exact in zip(ours, theirs, truth, strict=True):
        assert (got.double() - exact).norm() < (other.double() - exact).norm()
    assert abs(float(ours[0]) / float(truth[0]) - 1) < 1e-4


def test_autocast_rounds_nothing() -> None:
    hidden, weight = inputs(4, torch.float32)
    labels = torch.tensor([0, 1, 2, 3])
    expected = gradients(lambda h, w: linear_cross_entropy_sum(h, w, labels)[0], hidden, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(lambda h, w: linear_cross_entropy_sum(h, w, labels)[0], hidden, weight)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_huge_logit_neither_overflows_nor_hides_the_rest() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [1.0]])
    total, _ = linear_cross_entropy_sum(hidden, weight, torch.tensor([1, 1]))
    assert float(total.detach()) == pytest.approx(1e4 + math.log(2))
    assert torch.autograd.grad(total, hidden)[0].tolist() == [[1.0], [0.0]]  # 0.9998 if 1e4 + ln 2 were subtracted


def test_a_step_in_parts_is_the_step() -> None:
    """Sums and counts of micro-batches with unequal counts, divided once: the mean over the step's tokens. Weights of
    single rows, which come too late for gradients made in forward, are calls of their own."""
    hidden, weight = inputs(12, torch.float64)
    labels = torch.tensor([1, 2, UNSUPERVISED, 4, 5, 6, UNSUPERVISED, 0, 1, 2, 3, 4])

    def mean_in_parts(hidden: Tensor, weight: Tensor) -> Tensor:
        parts = [
            linear_cross_entropy_sum(hidden[a:b], weight, labels[a:b]) for a, b in ((0, 3), (3, 4), (4, 4), (4, 12))
        ]
        total, count = (torch.stack(part).sum() for part in zip(*parts, strict=True))
        return total / count

    whole = gradients(lambda h, w: cross_entropy_sum(h @ w.T, labels)[0] / 10, hidden, weight)
    for got, expected in zip(gradients(mean_in_parts, hidden, weight), whole, strict=True):
        assert relative_error(got, expected) <= 1e-12

    weights = torch.arange(12, dtype=torch.float64)

    def weighted(hidden: Tensor, weight: Tensor) -> Tensor:
        rows = [linear_cross_entropy_sum(hidden[i : i + 1], weight, labels[i : i + 1])[0] for i in range(12)]
        return (torch.stack(rows) * weights).sum()

    def weighted_formula(hidden: Tensor, weight: Tensor) -> Tensor:
        losses = functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
        return (losses * weights).sum()

    formula = gradients(weighted_formula, hidden, weight)
    for got, expected in zip(gradients(weighted, hidden, weight), formula, strict=True):
        assert relative_error(got, expected) <= 1e-12


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_one_supervised_token_counts_in_full_however_its_document_is_split(parts: int) -> None:
    """Divided by each part's own count and averaged over parts, its gradient would be a half or a quarter."""
    hidden, weight = inputs(8, torch.float64)
    labels = torch.full((8,), UNSUPERVISED)
    labels[5] = 3

    def split(hidden: Tensor, weight: Tensor) -> Tensor:
        pieces = zip(hidden.chunk(parts), labels.chunk(parts), strict=True)
        pairs = [linear_cross_entropy_sum(piece, weight, ids) for piece, ids in pieces]
        total, count = (torch.stack(pair).sum() for pair in zip(*pairs, strict=True))
        return total / count

    whole = gradients(lambda h, w: functional.cross_entropy(h @ w.T, labels), hidden, weight)
    for got, expected in zip(gradients(split, hidden, weight), whole, strict=True):
        assert relative_error(got, expected) <= 1e-13


@pytest.mark.parametrize("bad", [VOCABULARY, -1, -101, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_labels_out_of_range_are_refused_with_their_row(bad: int, dtype: torch.dtype) -> None:
    hidden, weight = inputs(4, torch.float32)
    with pytest.raises(ValueError, match=rf"labels\[2\] is {bad}: must be -100 or from 0 to 6"):
        linear_cross_entropy_sum(hidden, weight, torch.tensor([0, UNSUPERVISED, bad, 6], dtype=dtype))


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight = inputs(3, torch.float32)
    labels = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weight \[7, 4\], labels \[3\]: must be \[T, W\], \[V, W\] and \[T\]"):
        linear_cross_entropy_sum(hidden, weight[:, :4], labels)
    with pytest.raises(ValueError, match=r"hidden is torch\.bfloat16, weight torch\.float32: must be one floating"):
        linear_cross_entropy_sum(hidden.bfloat16(), weight, labels)
    with pytest.raises(ValueError, match=r"labels is torch\.int16"):
        linear_cross_entropy_sum(hidden, weight, labels.short())
    with pytest.raises(ValueError, match=r"hidden is on cpu, weight on meta"):
        linear_cross_entropy_sum(hidden, weight.to("meta"), labels)
    with pytest.raises(ValueError, match=r"backend is 'fast': must be 'auto' or one of \['chunked', 'liger'\]"):
        linear_cross_entropy_sum(hidden, weight, labels, backend="fast")
    with pytest.raises(NotImplementedError, match="backend is 'liger': tensors are on cpu, liger runs on cuda"):
        linear_cross_entropy_sum(hidden, weight, labels, backend="liger")
