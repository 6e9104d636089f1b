from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.packer.balance import METHODS, Partition, partition, spread
from tests.packer.reference import best_makespan
from tests.packer.reference_balance import (
    best_heaviest,
    exchange_helps,
    heaviest_by_differencing,
    loads_of,
    longest_first,
)

costs_lists = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**40)), max_size=60)
few_costs = st.lists(st.integers(0, 50), max_size=8)
numbers_of_parts = st.integers(1, 12)


def heavy_tail(items: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Costs of documents of log-normal lengths: a few have much of the cost."""
    normal = np.random.default_rng(seed).standard_normal(items)
    lengths = np.clip(601 * np.exp(1.8 * normal), 1, 131072).astype(np.int64)
    return np.asarray(24576 * lengths + lengths * lengths)


def check(result: Partition, costs: list[int], parts: int) -> None:
    """Every item has a part, and what is said of the parts is so."""
    assert result.part_of.dtype == result.loads.dtype == result.counts.dtype == np.int64
    part_of = result.part_of.tolist()
    assert len(part_of) == len(costs) and all(0 <= part < parts for part in part_of)
    assert result.loads.tolist() == [
        sum(c for c, p in zip(costs, part_of, strict=True) if p == q) for q in range(parts)
    ]
    assert result.counts.tolist() == [part_of.count(q) for q in range(parts)]
    assert result.lower_bound <= result.loads.max()


@given(costs_lists, numbers_of_parts, st.sampled_from(sorted(METHODS)))
def test_every_method_gives_every_item_one_part(costs: list[int], parts: int, method: str) -> None:
    check(partition(costs, parts, method=method), costs, parts)


@given(costs_lists, numbers_of_parts)
def test_longest_first_matches_the_textbook(costs: list[int], parts: int) -> None:
    assert partition(costs, parts, method="longest_first").part_of.tolist() == longest_first(costs, parts)


@given(costs_lists, st.lists(st.integers(0, 2**40), min_size=1, max_size=12))
def test_spread_goes_on_from_the_loads_given(costs: list[int], loads: list[int]) -> None:
    part_of, after = spread(np.array(costs, np.int64), np.array(loads, np.int64))
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        part = loads.index(min(loads))
        assert part_of[item] == part
        loads[part] += costs[item]
    assert after.tolist() == loads


@given(costs_lists, numbers_of_parts)
def test_differencing_is_as_good_as_the_textbook(costs: list[int], parts: int) -> None:
    result = partition(costs, parts, method="differencing")
    assert result.loads.max() == heaviest_by_differencing(costs, parts)


@given(st.lists(st.integers(0, 3), max_size=60), numbers_of_parts)
def test_differencing_is_as_good_with_many_ties(costs: list[int], parts: int) -> None:
    result = partition(costs, parts, method="differencing")
    assert result.loads.max() == heaviest_by_differencing(costs, parts)


def test_differencing_takes_many_items_and_parts() -> None:
    costs = heavy_tail(20_000, 0)
    result = partition(costs, 512, method="differencing")
    assert result.loads.sum() == costs.sum()
    assert result.loads.max() <= partition(costs, 512, method="longest_first").loads.max()


@given(few_costs, st.integers(1, 3))
def test_bound_optimum_and_partition_come_in_that_order(costs: list[int], parts: int) -> None:
    result = partition(costs, parts)
    optimum = best_makespan(costs, parts)
    heaviest = int(result.loads.max())
    assert result.lower_bound <= optimum <= heaviest
    assert 3 * parts * heaviest <= (4 * parts - 1) * optimum  # Graham's guarantee


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 3))
def test_with_equal_counts_too(costs: list[int], parts: int) -> None:
    result = partition(costs, parts, equal_counts=True)
    optimum = best_heaviest(costs, parts, equal_counts=True)
    assert optimum is not None
    assert result.lower_bound <= optimum <= result.loads.max()


@given(costs_lists, numbers_of_parts, st.booleans())
def test_the_default_is_never_worse_than_longest_first(costs: list[int], parts: int, equal_counts: bool) -> None:
    plain = partition(costs, parts, equal_counts=equal_counts, method="longest_first")
    refined = partition(costs, parts, equal_counts=equal_counts, method="refined")
    best = partition(costs, parts, equal_counts=equal_counts)
    assert best.loads.max() <= refined.loads.max() <= plain.loads.max()


@given(costs_lists, st.integers(2, 12))
def test_refinement_stops_at_the_bound_or_where_no_exchange_helps(costs: list[int], parts: int) -> None:
    result = partition(costs, parts, method="refined")
    if result.excess > 2.0**-17:
        assert not exchange_helps(costs, result.part_of.tolist(), parts)


@given(costs_lists, numbers_of_parts, st.sampled_from(["longest_first", "refined", "best"]))
def test_equal_counts_differ_by_at_most_one(costs: list[int], parts: int, method: str) -> None:
    result = partition(costs, parts, equal_counts=True, method=method)
    check(result, costs, parts)
    assert result.counts.max() - result.counts.min() <= 1


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(30, 200),
    st.booleans(),
)
def test_the_capacity_is_never_exceeded(
    items: list[tuple[int, int]], parts: int, capacity: int, equal_counts: bool
) -> None:
    costs, tokens = [cost for cost, _ in items], [held for _, held in items]
    try:
        result = partition(costs, parts, equal_counts=equal_counts, capacity=capacity, tokens=tokens)
    except ValueError as refusal:
        assert "no part has room for it" in str(refusal)
        return
    check(result, costs, parts)
    assert max(loads_of(tokens, result.part_of.tolist(), parts)) <= capacity
    assert not equal_counts or result.counts.max() - result.counts.min() <= 1


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=7),
    st.integers(1, 3),
    st.integers(9, 25),
    st.booleans(),
)
def test_of_a_few_items_a_placement_is_found_wherever_there_is_one(
    items: list[tuple[int, int]], parts: int, capacity: int, equal_counts: bool
) -> None:
    costs, tokens = [cost for cost, _ in items], [held for _, held in items]
    optimum = best_heaviest(costs, parts, equal_counts=equal_counts, tokens=tokens, capacity=capacity)
    if optimum is None:
        with pytest.raises(ValueError, match="no part has room for it"):
            partition(costs, parts, equal_counts=equal_counts, capacity=capacity, tokens=tokens)
    else:
        result = partition(costs, parts, equal_counts=equal_counts, capacity=capacity, tokens=tokens)
        assert result.lower_bound <= optimum <= result.loads.max()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("equal_counts", [False, True])
def test_parts_that_were_full_are_filled_again(seed: int, equal_counts: bool) -> None:
    """Items cut from full parts; costs go against the tokens, so that the dearest first leads astray."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, 1001, (16, 11)), axis=1)
    tokens = rng.permutation(np.diff(cuts, axis=1, prepend=0, append=1000).ravel())
    result = partition(1000 - tokens, 16, equal_counts=equal_counts, capacity=1004, tokens=tokens)
    held = np.bincount(result.part_of, weights=tokens, minlength=16)
    assert held.max() <= 1004
    assert not equal_counts or set(result.counts.tolist()) == {12}


def test_tokens_are_the_costs_by_default() -> None:
    assert partition([5, 4, 3, 2, 1, 1], 2, capacity=8).loads.tolist() == [8, 8]


@pytest.mark.parametrize("options", [{}, {"equal_counts": True}, {"capacity": 300}, {"method": "differencing"}])
def test_any_integer_array_gets_the_same_answer_every_time(options: dict[str, Any]) -> None:
    values = np.random.default_rng(3).integers(0, 100, 50)
    expected = partition(values, 12, **options)
    read_only = values.copy()
    read_only.flags.writeable = False
    for same in (
        values.astype(np.uint8),
        values.astype(np.int16),
        values.astype(">i4"),
        values.astype(np.uint64),
        np.repeat(values, 2)[::2],
        values[::-1].copy()[::-1],
        read_only,
        values.tolist(),
        values,
    ):
        result = partition(same, 12, **options)
        assert result.part_of.tolist() == expected.part_of.tolist()
        assert result.loads.tolist() == expected.loads.tolist()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_extremes(method: str) -> None:
    giant = partition([2**40, *[1] * 20], 4, method=method)
    assert giant.loads.max() == giant.lower_bound == 2**40
    assert giant.excess == 0.0
    assert partition([7] * 12, 4, method=method).loads.tolist() == [21] * 4
    assert sorted(partition([3, 2], 4, method=method).loads.tolist()) == [0, 0, 2, 3]
    assert partition([2**40] * 9, 4, method=method).excess == 0.0  # some part has three: the bound knows
    assert partition([2**61, 2**61], 2, method=method).loads.tolist() == [2**61, 2**61]
    assert partition([4, 5], 1, method=method).part_of.tolist() == [0, 0]
    for nothing in ([], [0, 0]):
        result = partition(nothing, 3, method=method)
        assert result.imbalance == 1.0 and result.excess == 0.0 and result.lower_bound == 0


def test_limits_at_the_extremes() -> None:
    assert partition([], 3, equal_counts=True, capacity=1).counts.tolist() == [0, 0, 0]
    assert partition([3, 2], 4, equal_counts=True).counts.max() == 1
    assert partition([0] * 10, 4, equal_counts=True).counts.tolist() == [3, 3, 2, 2]
    giant = partition([2**40, *[1] * 7], 4, equal_counts=True)
    assert giant.loads.max() == giant.lower_bound == 2**40 + 1  # a giant needs company
    twins = partition([100, 100, *range(1, 7)], 2, equal_counts=True)
    assert twins.lower_bound == twins.loads.max() == 111


@pytest.mark.parametrize(
    "items, parts, excess", [(256, 8, 1e-4), (1000, 8, 1e-5), (8192, 64, 1e-4), (10_000, 64, 1e-5)]
)
def test_heavy_tails_are_balanced_with_equal_counts(items: int, parts: int, excess: float) -> None:
    found = [partition(heavy_tail(items, seed), parts, equal_counts=True) for seed in range(10)]
    assert max(result.excess for result in found) <= excess
    assert all(result.counts.max() - result.counts.min() == (items % parts > 0) for result in found)


def test_few_items_for_each_part_gain_from_differencing() -> None:
    rng = np.random.default_rng(5)
    lists = [rng.integers(1, 10**6, 32) for _ in range(20)]
    mean = {m: float(np.mean([partition(costs, 8, method=m).excess for costs in lists])) for m in METHODS}
    assert mean["best"] < 0.8 * mean["refined"] < 0.8 * mean["differencing"]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="parts is 0: must be at least 1"):
        partition([1], 0)
    with pytest.raises(ValueError, match=r"costs\[0\] is -1"):
        partition([-1], 2)
    with pytest.raises(ValueError, match="costs has dtype float64"):
        partition([1.5], 2)
    with pytest.raises(ValueError, match="sum of costs is over"):
        partition([2**62, 2**62], 2)
    with pytest.raises(ValueError, match="method is 'luck': must be one of best, refined, longest_first, differencing"):
        partition([1], 2, method="luck")
    with pytest.raises(ValueError, match="'differencing' knows no limits"):
        partition([1, 2], 2, method="differencing", equal_counts=True)
    with pytest.raises(ValueError, match="'differencing' knows no limits"):
        partition([1, 2], 2, method="differencing", capacity=9)


def test_bad_capacities_and_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0: must be at least 1"):
        partition([1], 2, capacity=0)
    with pytest.raises(ValueError, match="tokens are given without a capacity"):
        partition([1], 2, tokens=[1])
    with pytest.raises(ValueError, match="3 tokens for 2 costs"):
        partition([1, 2], 2, capacity=5, tokens=[1, 2, 3])
    with pytest.raises(ValueError, match=r"tokens\[1\] is -2"):
        partition([1, 2], 2, capacity=5, tokens=[1, -2])
    with pytest.raises(ValueError, match="sum of tokens is over"):
        partition([1, 2], 2, capacity=2**62, tokens=[2**62, 2**62])
    with pytest.raises(ValueError, match="item 1 has 9 tokens: more than the capacity, 8"):
        partition([1, 2], 2, capacity=8, tokens=[3, 9])


def test_a_refusal_says_which_item_and_how_much_room_is_left() -> None:
    refusal = (
        "item 2 has 5 tokens: no part has room for it, the most room left in any of 2 parts is 3; use more parts or"
    )
    with pytest.raises(ValueError, match=refusal):
        partition([1, 1, 1], 2, capacity=8, tokens=[5, 5, 5])
