import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.cost import CostModel, ModelShape, attended_pairs

LLAMA_7B = ModelShape(layers=32, width=4096, heads=32, kv_heads=32, head_width=128, ffn_width=11008, vocab_size=32000)


@given(st.lists(st.integers(0, 2_000_000), max_size=20), st.integers(0, 99), st.integers(1, 99_999), st.integers(0, 99))
def test_cost_is_the_formula_in_exact_integers(lengths: list[int], fixed: int, linear: int, quadratic: int) -> None:
    model = CostModel(fixed=fixed, linear=linear, quadratic=quadratic)
    expected = [
        fixed + linear * n + quadratic * sum(range(1, n + 1) if n < 50 else [n * (n + 1) // 2]) for n in lengths
    ]
    assert model.of(np.array(lengths, np.int64)).tolist() == expected


def test_a_7b_models_terms_cross_where_its_shape_says() -> None:
    """6·N FLOPs per token against 12·layers·width per pair, pairs being half of L²: L* = N / (layers · width) − 1."""
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert LLAMA_7B.flops_per_token == 6 * weights
    assert LLAMA_7B.flops_per_pair == 12 * 32 * 4096
    assert LLAMA_7B.cost_model().crossover == pytest.approx(weights / (32 * 4096) - 1, rel=1e-4)


def test_costs_that_would_wrap_are_refused() -> None:
    with pytest.raises(ValueError, match="a document of 4000000000 tokens costs"):
        CostModel(quadratic=64).of(np.array([5, 4_000_000_000]))
    with pytest.raises(ValueError, match="sum of costs is over"):
        CostModel(quadratic=64).of(np.full(100, 200_000_000))


def test_bad_coefficients_are_refused() -> None:
    with pytest.raises(ValueError, match="linear is -1"):
        CostModel(linear=-1)
    with pytest.raises(ValueError, match="all 0"):
        CostModel(linear=0)


def test_pairs_of_causal_attention() -> None:
    assert attended_pairs(np.array([0, 1, 2, 65536])).tolist() == [0, 1, 3, 2147516416]
