import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.sorting import descending


@given(st.lists(st.one_of(st.integers(0, 2**62), st.integers(0, 10**9), st.integers(0, 9)), max_size=50))
def test_the_largest_come_first_and_equals_keep_their_order(values: list[int]) -> None:
    expected = sorted(range(len(values)), key=lambda i: -values[i])
    assert descending(np.array(values, np.int64)).tolist() == expected


@pytest.mark.parametrize("largest", [0, 3, 2**20, 2**62])
def test_thousands_of_any_width(largest: int) -> None:
    values = np.random.default_rng(1).integers(0, largest + 1, 3000)
    assert descending(values).tolist() == np.argsort(-values, kind="stable").tolist()
