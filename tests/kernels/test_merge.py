"""Joining two sets of keys: the formula in float64, rows that saw nothing, either mark for them, large scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqmesh.kernels.merge import merge
from tests.kernels.reference import relative_error


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """scores [Hq, T, keys], values [keys, D] -> (out [T, Hq, D], lse [Hq, T]), a row of −inf giving 0 and −inf."""
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return (weights @ values).transpose(0, 1), torch.logsumexp(scores, dim=-1)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    keys=st.integers(0, 6),
    cut=st.integers(0, 6),
    size=st.sampled_from([1.0, 1e4]),
    mark=st.sampled_from([-torch.inf, torch.inf]),
    seed=st.integers(0, 99),
)
def test_two_parts_give_the_whole(rows: int, keys: int, cut: int, size: float, mark: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, rows, keys, generator=generator, dtype=torch.float64) * size
    scores = scores.masked_fill(torch.rand(2, rows, keys, generator=generator) < 0.4, -torch.inf)
    values = torch.randn(keys, 3, generator=generator, dtype=torch.float64)
    out_a, lse_a = attend(scores[..., :cut], values[:cut])
    out_b, lse_b = attend(scores[..., cut:], values[cut:])
    marked = (lse.masked_fill(lse == -torch.inf, mark) for lse in (lse_a, lse_b))
    out, lse = merge(out_a, next(marked), out_b, next(marked))
    expected, expected_lse = attend(scores, values)
    unseen = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen)
    assert relative_error(lse[~unseen], expected_lse[~unseen]) <= 1e-12
    assert relative_error(out, expected) <= 1e-12
    assert not out.transpose(0, 1)[unseen].any()


def test_weights_add_up_to_one_beside_scores_that_float32_rounds_coarsely() -> None:
    ones, lse = torch.ones(1, 1, 4), torch.tensor([[3e6]])
    out, _ = merge(ones, lse, ones, lse - 1)
    torch.testing.assert_close(out, ones, rtol=0, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_sum_has_the_dtype_of_the_statistics(dtype: torch.dtype) -> None:
    out, lse = merge(*(x for _ in range(2) for x in (torch.ones(3, 2, 4, dtype=dtype), torch.zeros(2, 3))))
    assert out.dtype == lse.dtype == torch.float32
