from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.benchmarks.lengths import STEPS
from seqmesh.packer.cost import CostModel
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.offload import (
    Offload,
    largest_offloaded_document,
    memory_tokens,
    share_hidden,
    share_needed,
    smallest_offloaded_rings,
)
from seqmesh.packer.pieces import largest_document, smallest_rings
from seqmesh.packer.plan import Mesh, Mode, StepPlan, check_plan
from tests.packer.reference_planner import best_makespan, finish_times, micro_batch_times

COST = CostModel(fixed=7, linear=100, quadratic=2)
LINKS = CostModel(fixed=7, linear=100, quadratic=2, row_near=3, row_far=40)


@st.composite
def steps(draw: st.DrawFn, most: int = 40) -> tuple[list[int], Mesh]:
    """Documents of any length that the mesh can hold at all."""
    ranks = draw(st.integers(1, 6))
    mesh = Mesh(
        ranks=ranks,
        capacity=draw(st.integers(2, 60)),
        mode=draw(st.sampled_from(["free", "waves"])),
        ranks_per_node=draw(st.sampled_from([None, 1, 2, 3, ranks])),
    )
    longest = largest_document(mesh.ranks, mesh.capacity)
    length = st.one_of(st.integers(0, min(mesh.capacity, longest)), st.integers(0, longest), st.just(longest))
    return draw(st.lists(length, max_size=most)), mesh


costs = st.builds(
    CostModel,
    fixed=st.sampled_from([0, 7]),
    linear=st.integers(1, 200),
    quadratic=st.integers(0, 4),
    row_near=st.sampled_from([0, 30]),
    row_far=st.sampled_from([0, 300]),
)


@given(steps(), costs)
def test_every_plan_passes_the_validator(case: tuple[list[int], Mesh], cost: CostModel) -> None:
    lengths, mesh = case
    plan = plan_step(lengths, mesh, cost)
    check_plan(plan, np.array(lengths, np.int64), ranks=mesh.ranks, capacity=mesh.capacity)
    assert plan.supervised_tokens == sum(max(n - 1, 0) for n in lengths)
    found = [p for rank in range(mesh.ranks) for wave in range(plan.waves[rank]) for p in plan.pieces(rank, wave)]
    assert found == list(range(len(plan.document)))


@given(steps(), st.sampled_from([COST, LINKS, replace(LINKS, window=5)]))
def test_the_makespan_is_when_the_last_rank_is_done(case: tuple[list[int], Mesh], cost: CostModel) -> None:
    lengths, mesh = case
    plan = plan_step(lengths, mesh, cost)
    times = micro_batch_times(plan, lengths, mesh, cost)
    assert plan.cost.tolist() == [
        sum(time for (rank, _), time in times.items() if rank == mine) for mine in range(mesh.ranks)
    ]
    assert plan.makespan == max(finish_times(plan, times))
    assert max(int(plan.cost.max()), plan.lower_bound) <= plan.makespan


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=4),
    st.sampled_from([COST, LINKS, CostModel(linear=1, quadratic=2, row_near=9)]),
    st.sampled_from(["free", "waves"]),
    st.sampled_from([None, 2]),
)
def test_the_bound_is_below_the_best_there_is(
    lengths: list[int], cost: CostModel, mode: Mode, per_node: int | None
) -> None:
    mesh = Mesh(ranks=3, capacity=12, mode=mode, ranks_per_node=per_node)
    plan = plan_step(lengths, mesh, cost)
    best = best_makespan(lengths, mesh, cost)
    if mode == "free":
        assert plan.lower_bound <= best
    assert best <= plan.makespan


def web_like(documents: int, longest: int, seed: int = 0) -> Any:
    return np.clip(np.random.default_rng(seed).lognormal(6.4, 1.5, documents), 1, longest).astype(np.int64)


@pytest.mark.parametrize(("mode", "most"), [("free", 0.005), ("waves", 0.03)])
@pytest.mark.parametrize("linear", [0, 37_000])
def test_plans_are_near_the_bound_and_full(mode: Mode, most: float, linear: int) -> None:
    for seed in range(3):
        lengths = web_like(1000, 65_536, seed)
        mesh = Mesh(ranks=32, capacity=8192, mode=mode, ranks_per_node=8)
        plan = plan_step(lengths, mesh, CostModel(linear=linear, quadratic=2))
        check_plan(plan, lengths, ranks=32, capacity=8192)
        assert plan.gap <= most


def test_a_document_that_would_be_the_critical_path_gets_more_ranks_than_it_needs() -> None:
    plan = plan_step([8192, *[1024] * 8], Mesh(ranks=2, capacity=8192), CostModel(linear=0, quadratic=2))
    assert plan.rings == 1
    assert plan.gap < 0.001
    without = CostModel(linear=0, quadratic=2, row_near=10**6)  # as long as the way of its keys does not cost more
    assert plan_step([8192, *[1024] * 8], Mesh(ranks=2, capacity=8192), without).rings == 0


def test_rings_of_any_size_stay_inside_a_node_where_they_fit() -> None:
    lengths = web_like(400, 30_000)
    for mode in ("free", "waves"):
        plan = plan_step(lengths, Mesh(ranks=24, capacity=4096, mode=mode, ranks_per_node=8), LINKS)
        sizes = np.diff(plan.ring_offsets)
        assert plan.rings > 20
        assert set(sizes.tolist()) - {1, 2, 4, 8, 16}
        for document in np.flatnonzero((sizes > 1) & (sizes <= 8)):
            ring = plan.ring_ranks[plan.ring_offsets[document] : plan.ring_offsets[document + 1]]
            assert len(set((ring // 8).tolist())) == 1


def test_ranks_that_wait_for_a_ring_compute_whole_documents_meanwhile() -> None:
    lengths = [40, 30, *[2] * 100]  # the ring of two begins when one of three has ended, on a rank that was free so far
    plan = plan_step(lengths, Mesh(ranks=4, capacity=16), CostModel(linear=100))
    assert np.diff(plan.ring_offsets)[:2].tolist() == [3, 2]
    assert plan.gap < 0.03
    assert any(plan.wave[plan.document == 1] > 0)


def test_waves_are_equal_for_all_ranks() -> None:
    lengths = [16, *[3] * 40]
    free = plan_step(lengths, Mesh(ranks=3, capacity=16), CostModel(linear=1, quadratic=900))
    waves = plan_step(lengths, Mesh(ranks=3, capacity=16, mode="waves"), CostModel(linear=1, quadratic=900))
    assert len(set(free.waves.tolist())) > 1
    assert len(set(waves.waves.tolist())) == 1
    assert waves.makespan >= free.makespan


def test_waves_are_full_where_the_tokens_allow_it() -> None:
    lengths = web_like(3000, 8192)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), int(0.975 * 16 * 8192 * 8)))]
    plan = plan_step(lengths, Mesh(ranks=16, capacity=8192, mode="waves"), CostModel(linear=37_000, quadratic=2))
    assert plan.waves.tolist() == [8] * 16
    assert plan.tokens / (16 * 8 * 8192) >= 0.97


def test_a_large_mesh_is_planned_near_the_bound() -> None:
    lengths = np.append(web_like(4000, 200_000), [500_000, 1_000_000])
    mesh = Mesh(ranks=1024, capacity=8192, ranks_per_node=8)
    plan = plan_step(lengths, mesh, CostModel(fixed=10**6, linear=37_000, quadratic=2, row_near=500, row_far=2000))
    assert plan.gap < 0.05
    assert plan.rings > 50


def test_no_rank_runs_forward_far_more_often_than_another() -> None:
    """A scheduler that evens out work alone gives one rank 3 and another 145 short documents, each run on its own."""
    for seed in range(3):
        lengths = STEPS["wlbllm"](1 << 20, 120_000, seed)
        for mode in ("free", "waves"):
            plan = plan_step(lengths, Mesh(ranks=8, capacity=16_384, mode=mode), CostModel(linear=37_000, quadratic=2))
            assert plan.waves.max() <= plan.waves.min() + 3


@given(steps(), st.integers(2, 4))
def test_pipelines_get_valid_plans_and_the_same_documents(case: tuple[list[int], Mesh], stages: int) -> None:
    lengths, mesh = case
    mesh = replace(mesh, mode="free", stages=stages)
    plan = plan_step(lengths, mesh, COST)
    check_plan(plan, np.array(lengths, np.int64), ranks=mesh.ranks, capacity=mesh.capacity)
    assert plan.lower_bound <= plan.makespan


def test_pipelines_of_unequal_counts_are_planned_for_their_own_makespan() -> None:
    lengths = web_like(1500, 32_768)
    mesh = Mesh(ranks=8, capacity=8192, stages=4)
    cost = CostModel(fixed=10**6, linear=37_000, quadratic=2)
    plan = plan_step(lengths, mesh, cost)
    flat = plan_step(lengths, replace(mesh, stages=1), cost)
    assert len(set(plan.waves.tolist())) > 1
    assert plan.makespan < 0.4 * flat.makespan  # four stages, and the bubble
    assert plan.gap < 0.25


OFFLOAD = Offload(layers=32, token_cost=500)


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(3, 96))
def test_the_share_that_is_needed_is_the_least_that_fits(tokens: int, capacity: int, layers: int) -> None:
    (share,) = share_needed(np.array([tokens]), capacity, layers)
    fitting = [s for s in range(257) if memory_tokens(np.array([tokens]), np.array([s]), layers)[0] <= capacity]
    assert int(share) == (min(fitting) if fitting else 257)


def test_offload_shrinks_rings_and_is_hidden() -> None:
    lengths = np.array([64, 256, 1024, 2048]) * 1024
    cost = CostModel(linear=37_000, quadratic=2)
    free_copies = smallest_offloaded_rings(lengths, 8192, cost, Offload(layers=32, token_cost=1))
    assert smallest_rings(lengths, 8192).tolist() == [8, 32, 128, 256]
    assert free_copies.tolist() == [1, 3, 9, 17]  # ⌈s / C · 2 / l⌉, and one more where one token more does not fit
    dear = smallest_offloaded_rings(lengths, 8192, cost, Offload(layers=32, token_cost=200_000))
    assert dear[0] == 5  # longer documents compute for longer per token, and hide all their copies
    assert dear[1:].tolist() == free_copies[1:].tolist()
    plan = plan_step(lengths, Mesh(ranks=64, capacity=8192, offload=Offload(layers=32, token_cost=20_000)), cost)
    check_plan(plan, lengths, ranks=64, capacity=8192, layers=32)
    assert plan.offload.max() > 0
    for piece in np.flatnonzero(plan.offload):
        held = np.array([int(plan.lengths[plan.document[piece]]) // int(plan.ring_size[piece]) + 1])
        hidden = share_hidden(held, plan.costs[[piece]], Offload(layers=32, token_cost=20_000))
        assert plan.offload[piece] <= hidden[0] + 1


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 4),
    st.integers(2, 40),
    st.integers(3, 20),
    st.integers(1, 4000),
    st.integers(1, 200),
    st.sampled_from([None, 30]),
)
def test_a_mesh_holds_every_document_up_to_its_largest(
    ranks: int, capacity: int, layers: int, token_cost: int, wanted: int, window: int | None
) -> None:
    """Also where a longer one would fit again, as its compute hides more."""
    cost = CostModel(linear=10, quadratic=2, window=window)
    offload = Offload(layers=layers, token_cost=token_cost)
    lengths = np.arange(1, max(wanted, largest_document(ranks, capacity)) + 1)
    rings = smallest_offloaded_rings(lengths, capacity, cost, offload)
    too_large = np.flatnonzero(rings > ranks)
    expected = int(lengths[too_large[0]]) - 1 if len(too_large) else len(lengths)
    assert largest_offloaded_document(ranks, capacity, cost, offload, wanted) == expected


def test_offload_needs_mode_free_and_layers() -> None:
    with pytest.raises(ValueError, match="need mode 'free'"):
        Mesh(ranks=2, capacity=8, mode="waves", offload=OFFLOAD)
    with pytest.raises(ValueError, match="layers is 2"):
        Offload(layers=2, token_cost=1)


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
    columns = ("document", "rank", "wave", "ring_size", "ring_index", "costs", "begins", "ends", "offload")
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
    lengths = np.array([12, 9, 9, 3], np.int64)
    plan = plan_step(lengths, Mesh(ranks=2, capacity=9), CostModel(linear=1, quadratic=20))
    assert plan.rings == 1
    assert len(set(plan.waves.tolist())) > 1
    plan, asked = broken(plan, change)
    with pytest.raises(ValueError, match=r"plan|document|rank|waves"):
        check_plan(plan, asked.pop("lengths", lengths), **{"ranks": 2, "capacity": 9} | asked)
