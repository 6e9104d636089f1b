"""Ranks that plan different numbers of micro-steps for themselves, and then wait for each other for ever."""

from pathlib import Path

import numpy as np

from seqmesh.packer import CostModel, Mesh, check_plan, plan_step
from tests.trainer.test_gradient import Case, check_cases

LENGTHS = [8, 8, 8, 2, 2]
COST = CostModel(linear=1, quadratic=1)


def test_one_global_plan_gives_every_rank_the_same_count() -> None:
    plan = plan_step(LENGTHS, Mesh(ranks=2, capacity=8, mode="waves"), COST)
    check_plan(plan, np.array(LENGTHS), ranks=2, capacity=8)
    assert plan.waves.tolist() == [2, 2]
    held = [[sorted(plan.lengths[plan.document[plan.pieces(r, w)]].tolist()) for r in range(2)] for w in range(2)]
    assert held[0] == [[8], [8]]
    assert sorted(held[1]) == [[2, 2], [8]]


def test_ranks_with_less_run_fillers() -> None:
    """Three long documents and nothing else: one rank has two, the other one, and both run two waves."""
    plan = plan_step([8, 8, 8], Mesh(ranks=2, capacity=8, mode="waves"), COST)
    assert plan.waves.tolist() == [2, 2]
    assert [len(plan.pieces(1, wave)) for wave in range(2)] == [1, 0]


def test_the_steps_are_those_of_one_process(tmp_path: Path) -> None:
    settings = {"capacity": 8, "tokens_per_step": sum(LENGTHS), "cost": COST}
    check_cases(tmp_path, {"p08": Case(lengths=LENGTHS, settings=settings)}, 2)
