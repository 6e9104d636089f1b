import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer import free
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.levels import VARIANTS, RingOrder, Variant, candidates, relevel
from seqmesh.packer.pieces import largest_document, smallest_rings
from seqmesh.packer.pipeline import pipeline_bound, pipelined
from seqmesh.packer.plan import Assignment, Mesh, StepPlan, check_plan, make_plan

COST = CostModel(fixed=7, linear=100, quadratic=2)


def placed(lengths: Int64Array, mesh: Mesh, wider: int = 0) -> Assignment:
    sizes = np.minimum(smallest_rings(lengths, mesh.capacity) + wider * (lengths > mesh.capacity // 2), mesh.ranks)
    return free.place(lengths, sizes, mesh, COST)


def planned(lengths: Int64Array, assignment: Assignment, mesh: Mesh) -> StepPlan:
    return make_plan(lengths, assignment, mesh, COST, supervised_tokens=0)


def makespan(plan: StepPlan, stages: int) -> int:
    names = ("rank", "wave", "document", "ring_size", "costs")
    _, ends = pipelined(ranks=plan.ranks, stages=stages, **{name: getattr(plan, name) for name in names})
    return int(ends.max(initial=0))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Int64Array, Mesh]:
    mesh = Mesh(ranks=draw(st.integers(1, 5)), capacity=draw(st.integers(2, 40)))
    longest = largest_document(mesh.ranks, mesh.capacity)
    length = st.one_of(st.integers(0, min(mesh.capacity, longest)), st.integers(0, longest))
    return np.array(draw(st.lists(length, max_size=40)), np.int64), mesh


@given(steps(), st.integers(0, 1), st.integers(2, 5))
def test_every_variant_is_a_plan_with_the_same_rings_on_the_same_ranks(
    case: tuple[Int64Array, Mesh], wider: int, stages: int
) -> None:
    lengths, mesh = case
    assignment = placed(lengths, mesh, wider)
    bound = pipeline_bound(lengths, mesh.ranks, mesh.capacity, COST, stages, per_node=mesh.node)
    variants = list(candidates(assignment, lengths, mesh, COST, stages))
    assert variants[-1] is assignment
    assert len(variants) == len(VARIANTS) + 1
    for variant in variants:
        plan = planned(lengths, variant, mesh)
        check_plan(plan, lengths, ranks=mesh.ranks, capacity=mesh.capacity)
        assert bound <= makespan(plan, stages)
        for name in ("rings", "document", "index", "rank"):
            assert np.array_equal(getattr(variant, name), getattr(assignment, name))


def test_one_stage_has_nothing_to_vary() -> None:
    mesh = Mesh(ranks=2, capacity=10)
    lengths = np.array([4, 5, 6], np.int64)
    assert len(list(candidates(placed(lengths, mesh), lengths, mesh, COST, stages=1))) == 1


def times_of(plan: StepPlan, rank: int) -> list[int]:
    return [int(plan.costs[plan.pieces(rank, wave)].sum()) for wave in range(plan.waves[rank])]


def test_whole_documents_are_levelled_and_come_the_dearest_first() -> None:
    mesh = Mesh(ranks=1, capacity=100)
    lengths = np.array([90, 10, 80, 20, 50, 50], np.int64)
    assignment = placed(lengths, mesh)
    variant = relevel(assignment, lengths, COST.of(lengths), mesh, Variant("placed", 2, False), filling=2)
    times = times_of(planned(lengths, variant, mesh), 0)
    assert len(times) == 6
    assert times == sorted(times, reverse=True)


def test_a_document_over_the_capacity_is_alone() -> None:
    mesh = Mesh(ranks=1, capacity=10)
    lengths = np.array([50, 30, 3, 3, 0], np.int64)
    whole, nothing = np.arange(5), np.zeros(5, np.int64)
    assignment = Assignment(np.ones(5, np.int64), whole, nothing, nothing, whole)
    for finer in (1, 2):
        variant = relevel(assignment, lengths, COST.of(lengths), mesh, Variant("placed", finer, False), filling=0)
        assert np.bincount(variant.wave[:4]).max() == 1


def test_the_smallest_come_first_to_fill_the_pipeline() -> None:
    mesh = Mesh(ranks=2, capacity=100)
    lengths = np.array([150, *[40] * 8, *[1] * 4], np.int64)
    assignment = placed(lengths, mesh)
    variant = relevel(assignment, lengths, COST.of(lengths), mesh, Variant("placed", 4, True), filling=2)
    plan = planned(lengths, variant, mesh)
    assert plan.rings == 1
    assert plan.wave[plan.ring_size > 1].tolist() == [2, 2]
    for rank in range(2):
        first, second, ring, *others = times_of(plan, rank)
        assert first <= second <= min(others)
        assert ring > max(others)


@pytest.mark.parametrize(
    ("order", "expected"), [("placed", [3, 1, 4, 2]), ("ascending", [1, 2, 3, 4]), ("hill", [1, 3, 4, 2])]
)
def test_rings_come_in_the_order_that_is_asked_for(order: RingOrder, expected: list[int]) -> None:
    mesh = Mesh(ranks=2, capacity=100)
    lengths = np.array([30, 10, 40, 20], np.int64)
    pieces = np.arange(8)
    assignment = Assignment(np.full(4, 2), pieces // 2, pieces % 2, pieces % 2, pieces // 2)
    variant = relevel(assignment, lengths, COST.of(lengths), mesh, Variant(order, 1, False), filling=0)
    by_wave = variant.document[np.argsort(variant.wave, kind="stable")]
    assert (lengths[by_wave[::2]] // 10).tolist() == expected


def test_a_long_tail_gains_from_levels() -> None:
    """At four stages the plan as placed is a third over the bound, levelled a fifth."""
    lengths = np.clip(np.random.default_rng(1).lognormal(5, 1.0, 1000), 1, 4000).astype(np.int64)
    mesh = Mesh(ranks=4, capacity=2048)
    assignment = placed(lengths, mesh, wider=3)
    bound = pipeline_bound(lengths, 4, 2048, COST, 4, per_node=4)
    variants = candidates(assignment, lengths, mesh, COST, stages=4)
    *levelled, as_placed = [makespan(planned(lengths, variant, mesh), 4) / bound for variant in variants]
    assert as_placed > 1.3
    assert min(levelled) < 1.22
