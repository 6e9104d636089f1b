"""The benchmark of pipelines: what is replayed, measured, counted, and said."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.benchmarks.pipelines import CANDIDATES, DP, LEVELS, OURS, PP, Answer, Case, Job, compare, plan_of
from seqmesh.benchmarks.pipelines_rank import measure
from seqmesh.benchmarks.replay import Process, Work, meetings, replayed
from seqmesh.benchmarks.shards import random_shards
from seqmesh.packer.cost import CostModel
from seqmesh.packer.fit import Sample
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.plan import Mesh, StepPlan, check_plan
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.pipeline.order import Operation, Place, operations
from tests.ranks import run_ranks

COST = CostModel(fixed=300, linear=20, quadratic=2)


def planned_work(plan: StepPlan) -> dict[Process, Work]:
    """What the planner takes each operation for, in units of 1 / 3S of the costs'."""
    times = np.zeros((plan.ranks, int(plan.waves.max(initial=0))), np.int64)
    np.add.at(times, (plan.rank, plan.wave), plan.costs)
    return {
        (replica, stage): [
            (each, float(times[replica, each.batch] * (1 + each.backward)))
            for each in operations((times[replica] > 0).tolist(), Place(stage=stage, stages=plan.stages))
        ]
        for replica in range(plan.ranks)
        for stage in range(plan.stages)
    }


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=24),
    st.sampled_from([(1, 2), (2, 2), (2, 4), (3, 2), (3, 3)]),
)
def test_what_the_planner_expects_is_replayed_to_its_makespan(lengths: list[int], mesh: tuple[int, int]) -> None:
    ranks, stages = mesh
    plan = plan_step(lengths, Mesh(ranks=ranks, capacity=120, stages=stages), COST)
    found = replayed(plan, planned_work(plan), stages=stages)
    assert -(-int(found) // (3 * stages)) == plan.makespan


def test_rings_that_share_a_rank_meet() -> None:
    plan = plan_step([60, 60, 2], Mesh(ranks=3, capacity=40, stages=2), COST)
    groups = meetings(plan)
    assert {len(group) for group in groups.values()} <= {1, 2, 3}
    for (wave, rank), group in groups.items():
        assert rank in group
        assert all(groups[wave, other] == group for other in group)


def test_processes_that_wait_for_each_other_are_found() -> None:
    plan = plan_step([10, 10], Mesh(ranks=1, capacity=10, stages=2), COST)
    backward_first = [(Operation(0, 0, backward=True), 1.0), (Operation(0, 0), 1.0)]
    with pytest.raises(ValueError, match="all processes wait"):
        replayed(plan, {(0, 0): backward_first, (0, 1): [(Operation(0, 0), 1.0)]}, stages=2)


MODEL = {"vocab_size": 64, "width": 16, "layers": 4, "heads": 2, "kv_heads": 1}
STEPS = ((40, 5, 9, 3, 60, 2, 12, 30), (7, 30, 8, 8))
CASE = Case(lengths="", replicas=2, stages=2, capacity=32, tokens=0, steps=2)


def test_candidates_are_what_their_names_say() -> None:
    lengths, mesh = np.array(STEPS[0]), Mesh(ranks=2, capacity=32, stages=2)
    plans = {name: plan_of(name, lengths, mesh, COST) for name in CANDIDATES}
    for plan in plans.values():
        check_plan(plan, lengths, ranks=2, capacity=32)
        assert plan.stages == 2
    assert plans[OURS].makespan <= min(plan.makespan for plan in plans.values())
    levels = plan_step(lengths, replace(mesh, stages=1), COST)
    assert plans[LEVELS].wave.tolist() == levels.wave.tolist()
    assert plans[LEVELS].rank.tolist() == levels.rank.tolist()
    for name in (DP, PP):
        smallest = np.maximum(1, -(-lengths // 32))
        assert np.diff(plans[name].ring_offsets).tolist() == smallest.tolist()


def measured(ranks: Ranks, job: Job) -> Answer:
    shapes = ((4, 4), (1, 16), (1, 32), (2, 16), (8, 2), (1, 64))  # documents, their tokens
    samples = [
        Sample(tokens=n * size, pairs=n * size**2, seconds=1e-3 + 1e-5 * n * size * (20 + size)) for n, size in shapes
    ]
    with patch("seqmesh.benchmarks.pipelines_rank.timings", return_value=samples):
        return measure(job, ranks)


def test_all_train_alike_and_every_operation_is_timed(tmp_path: Path) -> None:
    random_shards(tmp_path / "set", np.concatenate([np.array(lengths) for lengths in STEPS]), vocab_size=64)
    job = Job(
        data=str(tmp_path / "set"),
        model=MODEL,
        capacity=32,
        stages=2,
        steps=STEPS,
        candidates=CANDIDATES,
        repeats=1,
    )
    first, *others = run_ranks(measured, 4, job)
    for name, found in first.found.items():
        assert found.error < 1e-5
        assert [other.found[name].error for other in others] == [found.error] * 3
        for wall, again, work in zip(found.wall, found.replayed, found.work, strict=True):
            assert 0 < work / 4 <= again
            assert wall > 0
        assert found.predicted_work / 4 <= found.predicted
    results = compare(CASE, first)
    rows = {each.name: each for each in results.rows}
    found = first.found[OURS]
    assert rows[f"{CASE.name}, replayed/{OURS}"].counts["bubble"] == pytest.approx(
        np.median([1 - work / (4 * span) for work, span in zip(found.work, found.replayed, strict=True)]), abs=1e-4
    )
    assert {each.figure for each in results.ratios} >= {"replayed_dp_balance_vs_pipeline", "wall_levels_vs_pipeline"}
