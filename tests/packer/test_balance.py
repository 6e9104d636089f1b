import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.balance import partition
from tests.packer.reference import best_makespan, longest_first

costs_lists = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**40)), max_size=60)


@given(costs_lists, st.integers(1, 12))
def test_partition_matches_the_textbook(costs: list[int], parts: int) -> None:
    result = partition(costs, parts)
    assert result.part_of.tolist() == longest_first(costs, parts)
    assert result.loads.tolist() == [
        sum(c for c, p in zip(costs, result.part_of, strict=True) if p == part) for part in range(parts)
    ]


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 3))
def test_bound_optimum_and_partition_come_in_that_order(costs: list[int], parts: int) -> None:
    result = partition(costs, parts)
    optimum = best_makespan(costs, parts)
    heaviest = int(result.loads.max())
    assert result.lower_bound <= optimum <= heaviest
    assert 3 * parts * heaviest <= (4 * parts - 1) * optimum  # Graham's guarantee


def test_many_even_items_are_balanced() -> None:
    result = partition(np.random.default_rng(0).integers(1, 100, 10_000), 64)
    assert result.imbalance < 1.001


def test_no_items_and_no_cost_count_as_balanced() -> None:
    assert partition([], 3).imbalance == 1.0
    assert partition([0, 0], 3).imbalance == 1.0


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="parts is 0"):
        partition([1], 0)
    with pytest.raises(ValueError, match=r"costs\[0\] is -1"):
        partition([-1], 2)
    with pytest.raises(ValueError, match="sum of costs is over"):
        partition([2**62, 2**62], 2)
