"""The benchmark of pipelines: what is replayed, measured, counted, and said."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.benchmarks.replay import Process, Work, meetings, replayed
from seqmesh.packer.cost import CostModel
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.plan import Mesh, StepPlan
from seqmesh.trainer.pipeline.order import Operation, Place, operations

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
