"""Figures of an order, beside the plain sums; what a perfect shuffle and none have."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.neighbours import FEWEST, neighbours


@given(st.integers(2, 4000), st.integers(0, 1000))
def test_figures_are_means_of_distances(count: int, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(count)
    found = neighbours(order)
    apart = [abs(a - b) for a, b in pairwise(order.tolist())]
    some = min(max(len(apart) // 100, FEWEST), len(apart))
    middle = (len(apart) - some) // 2
    parts = {"overall": apart, "first": apart[:some], "middle": apart[middle : middle + some], "last": apart[-some:]}
    for name, values in parts.items():
        assert getattr(found, name) == pytest.approx(sum(values) / len(values) / count)
    assert found.kept == apart.count(1) / len(apart)


def test_what_no_shuffle_and_a_perfect_one_have() -> None:
    kept = neighbours(np.arange(1000))
    assert (kept.overall, kept.first, kept.kept) == (0.001, 0.001, 1)
    perfect = neighbours(np.random.default_rng(0).permutation(1_000_000))
    assert all(abs(part - 1 / 3) < 0.02 for part in (perfect.overall, perfect.first, perfect.middle, perfect.last))
    assert perfect.kept < 1e-5


def test_one_item_has_no_neighbours() -> None:
    with pytest.raises(ValueError, match="the order has 1 items: neighbours need two"):
        neighbours(np.array([0]))
