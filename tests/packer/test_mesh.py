from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.packer.cost import CostModel
from seqmesh.packer.mesh import Mesh, plan_step
from seqmesh.packer.pieces import largest_document, piece_pairs, piece_tokens
from seqmesh.packer.plan import Mode, StepPlan, check_plan
from tests.packer.reference import best_makespan, finish_times

COST = CostModel(fixed=7, linear=100, quadratic=2)


@st.composite
def steps(draw: st.DrawFn, most: int = 40) -> tuple[list[int], Mesh]:
    """Documents of any length that the mesh can hold at all."""
    mesh = Mesh(
        ranks=draw(st.integers(1, 6)),
        capacity=draw(st.integers(2, 60)),
        mode=draw(st.sampled_from(["free", "waves"])),
    )
    longest = largest_document(mesh.ranks, mesh.capacity)
    length = st.one_of(st.integers(0, min(mesh.capacity, longest)), st.integers(0, longest), st.just(longest))
    return draw(st.lists(length, max_size=most)), mesh


@given(steps())
def test_every_plan_passes_the_validator(case: tuple[list[int], Mesh]) -> None:
    lengths, mesh = case
    plan = plan_step(lengths, mesh, COST)
    check_plan(plan, np.array(lengths, np.int64), ranks=mesh.ranks, capacity=mesh.capacity)
    assert plan.supervised_tokens == sum(max(n - 1, 0) for n in lengths)
    found = [p for rank in range(mesh.ranks) for wave in range(plan.waves[rank]) for p in plan.pieces(rank, wave)]
    assert found == list(range(len(plan.document)))
    for piece in range(len(plan.document)):
        place = int(plan.lengths[plan.document[piece]]), int(plan.ring_size[piece]), int(plan.ring_index[piece])
        assert plan.costs[piece] == 7 + 100 * piece_tokens(*place) + 2 * piece_pairs(*place)
        assert place[1] == 1 or place[0] > mesh.capacity  # nothing is spread that need not be


@given(steps())
def test_the_makespan_is_when_the_last_rank_is_done(case: tuple[list[int], Mesh]) -> None:
    lengths, mesh = case
    plan = plan_step(lengths, mesh, COST)
    assert plan.makespan == max(finish_times(plan))
    assert plan.lower_bound <= plan.makespan
    assert plan.makespan >= plan.cost.max()


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 3))
def test_bound_optimum_and_makespan_come_in_that_order(lengths: list[int], ranks: int) -> None:
    plan = plan_step(lengths, Mesh(ranks=ranks, capacity=9), COST)
    optimum = best_makespan(COST.of(np.array(lengths, np.int64)).tolist(), ranks)
    assert plan.lower_bound <= optimum <= plan.makespan


@settings(max_examples=25)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=4))
def test_the_bound_is_below_the_best_of_all_plans_with_rings(lengths: list[int]) -> None:
    """All choices of ring (any members) for each document on 3 ranks, all orders: nothing beats the bound."""
    plan = plan_step(lengths, Mesh(ranks=3, capacity=12), COST)
    rings = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    best = min(max(_ring_loads(lengths, chosen)) for chosen in product(rings, repeat=len(lengths)))
    assert plan.lower_bound <= best


def _ring_loads(lengths: list[int], chosen: tuple[tuple[int, ...], ...]) -> list[int]:
    """Work of each rank, as if no rank ever waited."""
    loads = [0, 0, 0]
    for length, ring in zip(lengths, chosen, strict=True):
        for index, rank in enumerate(ring):
            place = length, len(ring), index
            loads[rank] += 7 + 100 * piece_tokens(*place) + 2 * piece_pairs(*place)
    return loads


def test_long_documents_get_rings_and_the_rest_fills_up() -> None:
    plan = plan_step([30, 5, 5, 5, 5, 5, 5], Mesh(ranks=3, capacity=16), COST)
    assert plan.rings == 1
    assert plan.ring_ranks[plan.ring_offsets[0] : plan.ring_offsets[1]].tolist() == [0, 1]
    assert plan.wave[plan.document == 0].tolist() == [0, 0]
    assert plan.waves.tolist() == [2, 2, 2]  # a document of 5 beside a piece of 15 would be over 16
    roomier = plan_step([30, 5, 5, 5, 5, 5, 5], Mesh(ranks=3, capacity=20), COST)
    assert roomier.waves.tolist() == [1, 1, 1]
    assert set(roomier.rank[roomier.ring_size == 1].tolist()) == {0, 1, 2}


def test_two_rings_of_the_same_ranks_share_a_wave_only_where_both_fit() -> None:
    assert plan_step([22, 22], Mesh(ranks=2, capacity=21), COST).waves.tolist() == [2, 2]
    assert plan_step([22, 22], Mesh(ranks=2, capacity=22), COST).rings == 0
    wide = plan_step([30, 30], Mesh(ranks=3, capacity=20), COST)
    assert wide.ring_ranks.tolist() == [0, 1, 1, 2]
    assert wide.wave[wide.document == 1].tolist() == [1, 1]
    assert plan_step([22, 22, 6], Mesh(ranks=2, capacity=17), COST).waves.tolist() == [2, 2]  # 6 beside a piece of 11


def test_waves_are_equal_for_all_ranks() -> None:
    lengths = [16, *[3] * 40]
    free = plan_step(lengths, Mesh(ranks=3, capacity=16), CostModel(linear=1, quadratic=9))
    waves = plan_step(lengths, Mesh(ranks=3, capacity=16, mode="waves"), CostModel(linear=1, quadratic=9))
    assert len(set(free.waves.tolist())) > 1
    assert set(waves.waves.tolist()) == {free.waves.max()}
    assert waves.makespan >= free.makespan


def test_planning_is_deterministic_and_the_digest_tells_plans_apart() -> None:
    lengths = np.random.default_rng(0).integers(1, 9000, 500)
    mesh = Mesh(ranks=4, capacity=4096)
    plan = plan_step(lengths, mesh, COST)
    assert plan.rings > 100
    assert plan.digest() == plan_step(lengths.astype(np.int32), mesh, COST).digest()
    others = [Mesh(ranks=5, capacity=4096), Mesh(ranks=4, capacity=4096, mode="waves"), Mesh(ranks=4, capacity=9000)]
    digests = {plan.digest(), plan_step(lengths[::-1], mesh, COST).digest()}
    assert len(digests | {plan_step(lengths, other, COST).digest() for other in others}) == 5


def test_supervised_tokens_can_be_given() -> None:
    assert plan_step([5, 5], Mesh(ranks=1, capacity=9), COST, supervised=[1, 0]).supervised_tokens == 1


@pytest.mark.parametrize("mode", ["free", "waves"])
def test_a_document_that_no_ring_holds_is_refused(mode: Mode) -> None:
    message = "document 1 has 33 tokens: needs a ring of 3 ranks of 16 tokens, there are 2"
    with pytest.raises(ValueError, match=message):
        plan_step([3, 33], Mesh(ranks=2, capacity=16, mode=mode), COST)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode is 'fast': must be one of free, waves"):
        Mesh(ranks=1, capacity=1, mode="fast")  # type: ignore[arg-type]  # wrong on purpose


def broken(plan: StepPlan, change: str) -> tuple[StepPlan, dict[str, Any]]:
    """A plan with one thing wrong, or another question for a plan that is right."""
    columns = ("document", "rank", "wave", "ring_size", "ring_index", "costs")
    swapped = np.arange(len(plan.document))
    swapped[[0, 1]] = [1, 0]
    match change:
        case "other_lengths":
            return plan, {"lengths": plan.lengths[::-1].copy()}
        case "ranks":
            return plan, {"ranks": 3}
        case "over":
            return plan, {"capacity": 5}
        case "lost":
            return replace(plan, **{name: getattr(plan, name)[:-1] for name in columns}), {}
        case "twice":
            return replace(plan, document=np.where(plan.document == 0, 1, plan.document)), {}
        case "late":
            return replace(plan, wave=plan.wave + 1), {}
        case "apart":
            return replace(plan, wave=plan.wave + (plan.ring_index == 1)), {}
        case "ring":
            return replace(plan, ring_ranks=1 - plan.ring_ranks), {}
        case "order":
            return replace(plan, **{name: getattr(plan, name)[swapped] for name in columns}), {}
        case _:
            return replace(plan, mode="waves"), {}


@pytest.mark.parametrize(
    "change", ["other_lengths", "ranks", "over", "lost", "twice", "late", "apart", "ring", "order", "uneven"]
)
def test_the_validator_finds_each_kind_of_broken_plan(change: str) -> None:
    lengths = np.array([12, 8, 3], np.int64)
    plan = plan_step(lengths, Mesh(ranks=2, capacity=9), COST)
    assert plan.rings == 1
    assert len(set(plan.waves.tolist())) > 1
    plan, asked = broken(plan, change)
    with pytest.raises(ValueError, match=r"plan|document|rank|waves"):
        check_plan(plan, asked.pop("lengths", lengths), **{"ranks": 2, "capacity": 9} | asked)
