from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.cost import CostModel
from seqmesh.packer.mesh import Mesh, plan_step
from seqmesh.packer.plan import check_plan
from tests.packer.reference import best_makespan

COST = CostModel(linear=100, quadratic=2)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 6), st.integers(50, 90))
def test_every_plan_passes_the_validator(lengths: list[int], ranks: int, capacity: int) -> None:
    plan = plan_step(lengths, Mesh(ranks=ranks, capacity=capacity), COST)
    check_plan(plan, np.array(lengths, np.int64), ranks=ranks, capacity=capacity)
    assert plan.supervised_tokens == sum(max(n - 1, 0) for n in lengths)
    assert plan.cost.sum() == sum(COST.of(np.array(lengths, np.int64)))
    found = [p for rank in range(ranks) for wave in range(plan.waves[rank]) for p in plan.pieces(rank, wave)]
    assert found == list(range(len(lengths)))


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 3))
def test_bound_optimum_and_makespan_come_in_that_order(lengths: list[int], ranks: int) -> None:
    plan = plan_step(lengths, Mesh(ranks=ranks, capacity=9), COST)
    optimum = best_makespan(COST.of(np.array(lengths, np.int64)).tolist(), ranks)
    assert plan.lower_bound <= optimum <= plan.makespan


def test_planning_is_deterministic_and_the_digest_tells_plans_apart() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 500)
    mesh = Mesh(ranks=4, capacity=4096)
    plan = plan_step(lengths, mesh, COST)
    assert plan.digest() == plan_step(lengths.astype(np.int32), mesh, COST).digest()
    assert plan.digest() != plan_step(lengths[::-1], mesh, COST).digest()
    assert plan.digest() != plan_step(lengths, Mesh(ranks=3, capacity=4096), COST).digest()


def test_supervised_tokens_can_be_given() -> None:
    assert plan_step([5, 5], Mesh(ranks=1, capacity=9), COST, supervised=[1, 0]).supervised_tokens == 1


def test_a_document_over_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 20 tokens: one rank holds 16"):
        plan_step([3, 20], Mesh(ranks=2, capacity=16), COST)


@pytest.mark.parametrize("change", ["other_lengths", "lost", "twice", "hole", "over", "ring", "ranks"])
def test_the_validator_finds_each_kind_of_broken_plan(change: str) -> None:
    lengths = np.array([6, 5, 4, 3, 2], np.int64)
    plan = plan_step(lengths, Mesh(ranks=2, capacity=8), COST)
    ranks, capacity = 2, 8
    if change == "other_lengths":
        lengths = lengths[::-1].copy()
    elif change == "lost":
        plan = replace(
            plan, **{n: getattr(plan, n)[:-1] for n in ("document", "rank", "wave", "ring_size", "ring_index")}
        )
    elif change == "twice":
        plan = replace(plan, document=np.where(plan.document == 0, 1, plan.document))
    elif change == "hole":
        plan = replace(plan, wave=plan.wave + 1)
    elif change == "over":
        capacity = 5
    elif change == "ring":
        plan = replace(plan, ring_ranks=1 - plan.ring_ranks)
    elif change == "ranks":
        ranks = 3
    with pytest.raises(ValueError, match=r"plan|document|rank|waves"):
        check_plan(plan, lengths, ranks=ranks, capacity=capacity)
