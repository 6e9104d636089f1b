"""The block shuffle: the order that its description says, each part in one window, and mixed well inside."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.blocks import block_permutation, block_table
from seqmesh.packer.permute import mix64, permutation, shuffle_key

sizes_of_parts = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def plain_blocks(sizes: list[int], window: int, key: int) -> list[list[int]]:
    """The items of each window: list the parts, shuffle them, cut them into windows, shuffle the items of each."""
    bounds = np.cumsum([0, *sizes]).tolist()
    parts = [list(range(a, b)) for a, b in pairwise(bounds)]
    shuffled = [parts[number] for number in permutation(len(parts), key).tolist()]
    windows, opens, count = [], 0, -(-len(parts) // window)
    for n in range(count):
        items = [item for part in shuffled[n * len(parts) // count : (n + 1) * len(parts) // count] for item in part]
        windows.append([items[at] for at in permutation(len(items), mix64(key ^ opens)).tolist()])
        opens += len(items)
    return windows


@given(sizes_of_parts, st.integers(1, 25), st.integers(0, 2**62))
def test_the_order_is_that_of_shuffled_lists(sizes: list[int], window: int, key: int) -> None:
    first = np.cumsum([0, *sizes])
    windows = plain_blocks(sizes, window, key)
    order = block_permutation(first, window, key).tolist()
    assert order == [item for items in windows for item in items]
    assert sorted(order) == list(range(sum(sizes)))
    held = [set(np.searchsorted(first, items, side="right").tolist()) for items in windows]
    assert max(map(len, held)) <= min(min(map(len, held)) + 1, window)
    assert sum(map(len, held)) == len(set().union(*held)) == len(sizes)


def test_a_window_that_is_larger_than_all_parts_is_one_shuffle_of_everything() -> None:
    first = np.arange(0, 10_001, 100)
    order = block_permutation(first, 1 << 40, shuffle_key(0, 0))
    assert block_table(first, 1 << 40, 1)[:, 2:].tolist() == [[0, 10_000]] * 100
    assert 0.3 < np.abs(np.diff(order)).mean() / 10_000 < 0.37


def test_orders_differ_between_epochs_seeds_and_windows() -> None:
    first = np.arange(0, 65, 4)
    orders = {
        tuple(block_permutation(first, window, shuffle_key(seed, epoch)).tolist())
        for seed in range(10)
        for epoch in range(10)
        for window in (1, 3, 4)
    }
    assert len(orders) == 300


def test_items_of_a_part_are_spread_over_their_window() -> None:
    """Ten parts of 500 in windows of five: of any hundred that follow each other each part has its share."""
    first = np.arange(0, 5001, 500)
    order = block_permutation(first, 5, shuffle_key(1, 2))
    for start in range(0, 5000, 100):
        counts = np.bincount(order[start : start + 100] // 500, minlength=10)
        assert np.count_nonzero(counts) == 5
        assert counts.max() < 45
