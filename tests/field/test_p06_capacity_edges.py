"""Packing at the edges of a capacity: nothing packed at odd capacities, or a bin over its capacity."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer import pack


def bin_sizes(lengths: list[int], capacity: int) -> list[int]:
    bins = pack(lengths, capacity)
    return sorted((len(bins.documents(b)) for b in range(bins.count)), reverse=True)


def test_capacities_that_are_no_powers_of_two_are_packed() -> None:
    assert bin_sizes([2730] * 10, 8191) == [3, 3, 3, 1]
    for capacity in (8192, 8193, 16385, 32769):
        assert pack([2048] * 3000, capacity).count == -(-3000 // (capacity // 2048))


def test_no_bin_goes_over_however_many_bins_tokens_alone_would_need() -> None:
    assert bin_sizes([7] * 8, 8) == [1] * 8


@pytest.mark.parametrize(("capacity", "count"), [(8191, 10), (8192, 5), (8193, 5)])
def test_one_token_more_or_less(capacity: int, count: int) -> None:
    assert pack([4096] * 10, capacity).count == count


def test_a_perfect_packing_is_found() -> None:
    bins = pack([5, 4, 3, 2, 2, 1, 1], 6)
    assert np.bincount(bins.bin_of, weights=[5, 4, 3, 2, 2, 1, 1]).tolist() == [6, 6, 6]


@given(st.lists(st.integers(1, 8193), max_size=50), st.sampled_from([8193, 8194, 16383, 16385]))
def test_every_index_once_none_over_every_dtype_alike(lengths: list[int], capacity: int) -> None:
    answers = []
    for dtype in (np.int16, np.uint16, np.int32, np.int64, np.uint64):
        bins = pack(np.array(lengths, dtype), capacity)
        assert sorted(bins.order.tolist()) == list(range(len(lengths)))
        assert all(sum(lengths[d] for d in bins.documents(b)) <= capacity for b in range(bins.count))
        answers.append(bins.bin_of.tolist())
    assert all(answer == answers[0] for answer in answers)
