"""Ranks that plan different numbers of micro-steps for themselves, and then wait for each other for ever."""

from pathlib import Path

import numpy as np

from seqmesh.packer import CostModel, Mesh, check_plan, plan_step
from seqmesh.packer.plan import Mode
from tests.ranks import run_ranks
from tests.support import make_set, settings_for
from tests.trainer.steps import CONFIG, Job, reference, relative_error, take_all

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


def test_the_gradient_is_that_of_one_process(tmp_path: Path) -> None:
    data = make_set(tmp_path, LENGTHS, vocab=CONFIG.vocab_size)
    modes: tuple[Mode, ...] = ("waves", "free")
    jobs = [
        Job(settings=settings_for(data, ranks=2, capacity=8, tokens_per_step=24, mode=mode, epochs=None))
        for mode in modes
    ]
    expected = reference(jobs[0].settings, LENGTHS).gradients
    for rank in run_ranks(take_all, 2, jobs):
        for taken in rank:
            for found, wanted in zip(taken.gradients, expected, strict=True):
                assert relative_error(found, wanted) <= 1e-9
