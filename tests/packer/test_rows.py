from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.cost import CostModel
from seqmesh.packer.rows import LARGEST_WINDOW, plan_rows

COST = CostModel(linear=4000, quadratic=1)


def web_like(documents: int, seed: int = 1) -> Any:
    return np.clip(np.random.default_rng(seed).lognormal(6.4, 1.5, documents), 1, 8192).astype(np.int64)


@given(
    st.lists(st.integers(0, 64), max_size=60),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from(["best_fit_decreasing", "best_fit_shuffled", "order_keeping", "concat"]),
)
def test_every_document_is_in_one_row_of_one_step(lengths: list[int], rows: int, epoch: int, method: str) -> None:
    plan = plan_rows(lengths, 64, rows, cost=COST, epoch=epoch, method=method)
    found = [piece for step in range(plan.steps) for row in range(rows) for piece in plan.pieces(step, row).tolist()]
    assert sorted(found) == list(range(len(plan.bins.lengths)))
    empty = int((plan.row_at < 0).sum())
    assert empty < rows
    assert not empty or len(found) < plan.steps * rows
    for index in range(plan.bins.count):
        assert plan.costs[index] == sum(COST.of(plan.bins.lengths[plan.bins.pieces(index)]).tolist())


def test_rows_of_a_step_cost_alike_and_neighbours_in_time_do_not() -> None:
    lengths = web_like(60_000)
    plan = plan_rows(lengths, 8192, 16, cost=COST)
    assert plan.imbalance < 1.01
    unsorted = np.arange(plan.bins.count).reshape(-1, 16)  # what a trainer gets that takes the rows as they were packed
    by_row = plan.costs[np.random.default_rng(0).permutation(unsorted.ravel()).reshape(-1, 16)]
    assert by_row.max(axis=1).sum() * 16 / by_row.sum() > 1.1

    of_bin = np.bincount(plan.bins.bin_of, weights=lengths) / np.bincount(plan.bins.bin_of)
    mean_length = of_bin[plan.row_at].mean(axis=1)
    assert abs(float(np.corrcoef(np.arange(plan.steps), mean_length)[0, 1])) < 0.06
    assert abs(float(np.corrcoef(mean_length[1:], mean_length[:-1])[0, 1])) < 0.06


def test_the_announced_number_of_steps_is_delivered() -> None:
    lengths = web_like(5_000)
    for rows in (1, 3, 8):
        plan = plan_rows(lengths, 8192, rows)
        assert plan.row_at.shape == (-(-plan.bins.count // rows), rows)
        assert plan.bins.count == plan.steps * rows
        assert sorted(plan.row_at.ravel().tolist()) == list(range(plan.bins.count))


def test_no_place_in_a_step_always_gets_the_same_kind_of_row() -> None:
    plan = plan_rows(web_like(60_000), 8192, 4, cost=COST)
    first_packed = plan.row_at.argmin(axis=1)  # bins are numbered from the longest documents on
    assert np.bincount(first_packed, minlength=4).min() > 0.2 * plan.steps


def test_the_same_every_time_other_rows_each_epoch_and_another_order_in_each_window() -> None:
    lengths = web_like(3_000)
    first, again, other_epoch, other_window = (
        plan_rows(lengths, 8192, 4, seed=3, epoch=epoch, window=window)
        for epoch, window in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert first.row_at.tolist() == again.row_at.tolist()
    assert first.bins.bin_of.tolist() == again.bins.bin_of.tolist() != other_epoch.bins.bin_of.tolist()
    assert first.row_at.tolist() != other_window.row_at.tolist()


def test_few_documents_leave_rows_empty_but_no_step_short() -> None:
    plan = plan_rows([5, 5, 5], 8, 4)
    assert plan.row_at.shape == (1, 4)
    assert sorted(len(plan.pieces(0, row)) for row in range(4)) == [0, 1, 1, 1]
    assert plan_rows([], 8, 4).steps == 0
    assert plan_rows([], 8, 4).imbalance == 1.0


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="rows_per_step is 0"):
        plan_rows([1], 8, 0)
    with pytest.raises(ValueError, match="cut it into windows of at most 1000000"):
        plan_rows(np.ones(LARGEST_WINDOW + 1, np.int64), 8, 4)
    with pytest.raises(ValueError, match="document 0 has 9 tokens"):
        plan_rows([9], 8, 4)
