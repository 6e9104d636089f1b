"""Grouped linear layers against one matmul for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqmesh.kernels import grouped
from seqmesh.kernels.grouped import grouped_linear
from tests.kernels.reference import leaves, relative_error

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def slow(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    groups = [group for group, count in enumerate(counts) for _ in range(count)]
    products = [weights[group] @ row for group, row in zip(groups, rows, strict=True)]
    return torch.stack(products) if products else rows @ weights[0].T


def drawn(counts: list[int], width: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(counts) + width)
    shapes = (sum(counts), width), (len(counts), out, width), (sum(counts), out)
    rows, weights, dout = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return rows.requires_grad_(), weights.requires_grad_(), dout


def check(counts: list[int], width: int, out: int, dtype: torch.dtype, tolerance: float) -> None:
    rows, weights, dout = drawn(counts, width, out, dtype)
    result, exact = grouped_linear(rows, weights, counts), leaves(rows, weights)
    expected = slow(exact[0], exact[1], counts)
    assert result.dtype == dtype
    found = (result, *torch.autograd.grad(result, (rows, weights), dout))
    wanted = (expected, *torch.autograd.grad(expected, exact, dout.double(), materialize_grads=True))
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) <= tolerance if b.any() else not a.any()


@given(COUNTS, st.integers(1, 9), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_every_row_is_multiplied_by_its_groups_matrix(counts: list[int], width: int, out: int) -> None:
    check(counts, width, out, torch.float64, 1e-14)


@given(COUNTS.filter(any), st.sampled_from([8, 16]), st.sampled_from([8, 24]))
@settings(deadline=None, max_examples=20)
def test_the_library_computes_the_same(counts: list[int], width: int, out: int) -> None:
    """As it does on a CPU. What it needs not write is found out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_library_takes", lambda *_operands: True)
        check(counts, width, out, torch.bfloat16, 1e-2)


def test_the_library_is_used_on_gpus_alone_and_for_what_is_aligned() -> None:
    rows, weights, _ = drawn([2, 3], 8, 16, torch.bfloat16)
    assert not grouped._library_takes(rows, weights, 2)
    assert grouped._is_aligned(weights)
    assert grouped._is_aligned(weights.transpose(1, 2))
    assert not grouped._is_aligned(rows[:, 1:])
    assert not grouped._is_aligned(drawn([2], 7, 8, torch.bfloat16)[1])


def test_gradients_that_are_not_asked_for_are_not_computed() -> None:
    rows, weights, dout = drawn([2, 0, 1], 3, 4, torch.float64)
    assert grouped_linear(rows.detach(), weights.detach(), [2, 0, 1]).grad_fn is None
    (dweights,) = torch.autograd.grad(grouped_linear(rows.detach(), weights, [2, 0, 1]), weights, dout)
    assert not dweights[1].any()
    assert dweights[0].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": [2, 2]}, r"counts are \[2, 2\]: must be 2 numbers from 0 that sum to 5, the rows"),
        ({"counts": [5]}, r"counts are \[5\]: must be 2 numbers"),
        ({"counts": [6, -1]}, r"counts are \[6, -1\]"),
        ({"weights": torch.zeros(2, 4, 7)}, r"rows are \[5, 3\], weights \[2, 4, 7\]: must be \[N, I\]"),
        (
            {"weights": torch.zeros(2, 4, 3, dtype=torch.float64)},
            r"are torch.float32 on cpu, weights torch.float64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    fitting: dict[str, Any] = {"rows": torch.zeros(5, 3), "weights": torch.zeros(2, 4, 3), "counts": [2, 3]}
    with pytest.raises(ValueError, match=message):
        grouped_linear(**fitting | changes)
