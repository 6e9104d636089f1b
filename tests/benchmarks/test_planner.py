"""The baselines keep what they promise, the drawn lengths are what they say, and the benchmark finds its figures."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from seqmesh.benchmarks import planner
from seqmesh.benchmarks.baselines.balance_scheduler import (
    Options,
    balanced_hdp,
    equal_buckets,
    grid,
    longest_first,
    take,
)
from seqmesh.benchmarks.baselines.byte_scale import naive_hdp, offload_ratios, offload_rings
from seqmesh.benchmarks.baselines.differencing import cut, differencing
from seqmesh.benchmarks.baselines.static_mesh import context_parallel, fewest_tokens, static_mesh
from seqmesh.benchmarks.baselines.wave_scheduler import power_of_two_rings, wave_scheduler
from seqmesh.benchmarks.harness import Results
from seqmesh.benchmarks.lengths import BYTED, GITHUB, LONGEST_CLASS, STEPS, class_lengths
from seqmesh.benchmarks.planner_cases import COSTS, H800, MODEL_7B, K
from seqmesh.benchmarks.planner_stages import FIGURES, OFFLOAD
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import largest_document, smallest_rings
from seqmesh.packer.plan import Assignment, Mesh, StepPlan, check_plan, make_plan

COST = COSTS["linear"]
TINY = replace(
    planner.QUICK,
    lists=("wlbllm",),
    shapes=planner.SHAPES,
    meshes=((4, 8 * K, 128 * K),),
    seeds=2,
    grid=grid((0.02,), (2,)),
    stages=64,
    large=64,
    sizes=(16,),
    repeats=1,
)


def documents(seed: int, mesh: Mesh) -> Int64Array:
    """A few dozen, up to the longest that the mesh holds."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mesh.capacity / 4), 1.5, 60)
    return np.clip(drawn, 1, largest_document(mesh.ranks, mesh.capacity)).astype(np.int64)


def checked(lengths: Int64Array, assignment: Assignment, mesh: Mesh, capacity: int | None = None) -> StepPlan:
    plan = make_plan(lengths, assignment, mesh, COST, supervised_tokens=0)
    check_plan(plan, lengths, ranks=mesh.ranks, capacity=capacity or mesh.capacity)
    return plan


@pytest.mark.parametrize("ranks", [1, 6, 8])
@pytest.mark.parametrize("seed", range(3))
def test_baselines_with_rings_keep_to_the_capacity(ranks: int, seed: int) -> None:
    mesh = Mesh(ranks=ranks, capacity=1_024)
    lengths = documents(seed, mesh)
    assignments = [naive_hdp(lengths, mesh), wave_scheduler(lengths, mesh)]
    assignments += [balanced_hdp(lengths, mesh, COST, options) for options in grid()]
    for assignment in assignments:
        assert checked(lengths, assignment, mesh).gap >= 0


def test_a_static_mesh_fills_groups_up_to_rounding() -> None:
    mesh = Mesh(ranks=8, capacity=1_024)
    lengths = documents(1, Mesh(ranks=3, capacity=1_024))
    degree = context_parallel(mesh, int(lengths.max()))
    assert degree == 4  # three ranks would hold it, but do not divide eight
    plan = checked(lengths, static_mesh(lengths, mesh), mesh, mesh.capacity + 2 * len(lengths))
    assert set(np.diff(plan.ring_offsets)) == {degree}
    for rank in range(mesh.ranks):
        for wave in range(plan.waves[rank]):
            assert lengths[plan.document[plan.pieces(rank, wave)]].sum() <= degree * mesh.capacity
    assert context_parallel(mesh, 8 * mesh.capacity) == 8
    with pytest.raises(ValueError, match="8 ranks hold 8192"):
        context_parallel(mesh, 8 * mesh.capacity + 1)


def test_a_static_mesh_deals_packs_by_count_or_by_tokens() -> None:
    lengths, mesh = np.array([1_000, 900, 800, 1_000]), Mesh(ranks=2, capacity=1_024)
    ranks = [static_mesh(lengths, mesh, by_tokens=by_tokens).rank.tolist() for by_tokens in (False, True)]
    assert ranks == [[0, 1, 0, 1], [0, 0, 1, 1]]
    assert fewest_tokens([5, 1, 4, 3], 2) == [0, 0, 1, 1]
    assert set(np.diff(checked(lengths, static_mesh(lengths, mesh, context=2_000), mesh).ring_offsets)) == {2}


def test_naive_hdp_deals_round_by_round() -> None:
    mesh = Mesh(ranks=4, capacity=100)
    lengths = np.array([250, 60, 150, 40, 90])  # a ring of 3, then one of 2, packs of 60 + 40 and 90
    found = naive_hdp(lengths, mesh)
    assert found.rings.tolist() == [3, 1, 2, 1, 1]
    places = {
        (d, r, w) for d, r, w in zip(found.document.tolist(), found.rank.tolist(), found.wave.tolist(), strict=True)
    }
    assert places == {(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 3, 0), (3, 3, 0), (2, 0, 1), (2, 1, 1), (4, 2, 1)}


def test_the_balance_scheduler_on_a_case_that_can_be_followed() -> None:
    mesh = Mesh(ranks=2, capacity=100)
    found = balanced_hdp(np.array([100, 60, 50, 50]), mesh, COST, Options(packs_first=False, slack=0.0))
    # 100 on rank 0; rank 1 is behind until it has 60 and a 50, in two micro-batches; the last goes to rank 0.
    assert found.document.tolist() == [0, 1, 2, 3]
    assert (found.rank.tolist(), found.wave.tolist()) == ([0, 1, 1, 0], [0, 0, 1, 1])


def test_buckets_are_of_like_work_and_taken_in_turn() -> None:
    lengths = np.array([8, 4, 4, 2, 2, 2, 2])
    loads = longest_first(lengths, np.ones_like(lengths), 8, COSTS["linear"], packs_first=False)
    buckets = equal_buckets(loads, 3)
    assert [len(bucket) for bucket in buckets] == [1, 2, 4]
    order = [int(take(buckets, "pp")[0].documents[0]) for _ in range(len(lengths))]
    assert order == [0, 1, 3, 2, 4, 5, 6]
    buckets = equal_buckets(loads, 3)
    assert [int(take(buckets, "dp")[0].documents[0]) for _ in range(len(lengths))] == list(range(7))
    assert not buckets


def test_waves_have_groups_of_powers_of_two_on_all_ranks() -> None:
    mesh = Mesh(ranks=8, capacity=1_024, mode="waves")
    lengths = documents(3, mesh)
    plan = checked(lengths, wave_scheduler(lengths, mesh), mesh)
    assert set(np.diff(plan.ring_offsets).tolist()) <= {1, 2, 4, 8}
    for wave in range(int(plan.waves[0])):
        assert len(set(plan.rank[plan.wave == wave].tolist())) == mesh.ranks
    assert power_of_two_rings(np.array([1_024, 1_025, 3_000]), mesh).tolist() == [1, 2, 4]


def test_differencing_refuses_long_documents_and_balances_the_rest() -> None:
    mesh = Mesh(ranks=4, capacity=1_024)
    lengths = documents(2, mesh)
    with pytest.raises(ValueError, match="is over the capacity, 1024"):
        differencing(lengths, mesh, COST)
    segments = cut(lengths, mesh.capacity)
    assert segments.sum() == lengths.sum()
    assert cut(np.array([2_048, 3, 1_025]), 1_024).tolist() == [1_024, 1_024, 3, 1_024, 1]
    assert checked(segments, differencing(segments, mesh, COST), mesh).gap < 0.05


def test_baselines_repeat_themselves() -> None:
    mesh = Mesh(ranks=8, capacity=1_024)
    lengths = documents(4, mesh)

    def digests() -> list[str]:
        found = [naive_hdp(lengths, mesh), wave_scheduler(lengths, mesh), static_mesh(lengths, mesh)]
        found += [balanced_hdp(lengths, mesh, COST, Options(balance="pp"))]
        return [make_plan(lengths, each, mesh, COST, supervised_tokens=0).digest() for each in found]

    assert digests() == digests()


@pytest.mark.parametrize(
    ("thousands", "rings"), [(64, (8, 5, 1)), (256, (32, 17, 2)), (1_024, (128, 68, 8)), (2_048, (256, 136, 16))]
)
def test_rings_with_offloading_are_those_of_the_formula(thousands: int, rings: tuple[int, ...]) -> None:
    length = np.array([thousands * K])
    assert tuple(int(offload_rings(length, 8 * K, 32, ratio)[0]) for ratio in (0, 0.5, 1)) == rings
    assert offload_rings(length, 8 * K, 32, 0)[0] == smallest_rings(length, 8 * K)[0]


def test_a_ratio_is_what_compute_hides_and_never_too_little_to_matter() -> None:
    lengths = np.array([4_096, 9_000, 16_384, 65_536, 1 << 20])
    ratios = offload_ratios(lengths, 8 * K, MODEL_7B, H800, OFFLOAD)
    assert ratios[0] == 0  # fits
    assert ratios[1] == 0  # compute hides less than one rank's capacity
    assert 0 < ratios[2] < ratios[3] <= ratios[4] == 1
    slower = offload_ratios(lengths, 8 * K, MODEL_7B, H800, replace(OFFLOAD, host=OFFLOAD.host / 4))
    assert (slower <= ratios).all()
    assert slower[3] < ratios[3]


def test_offloaded_rings_are_under_the_memory_minimum() -> None:
    mesh = Mesh(ranks=8, capacity=1_024)
    lengths = np.array([8_000, 3_000, 500, 400])
    rings = offload_rings(lengths, mesh.capacity, 32, 0.5)
    assert (rings <= smallest_rings(lengths, mesh.capacity)).all()
    for assignment in (
        naive_hdp(lengths, mesh, rings=rings),
        balanced_hdp(lengths, mesh, COST, Options(), rings=rings),
    ):
        checked(lengths, assignment, mesh, capacity=1 << 30)
        with pytest.raises(ValueError, match="more than the capacity"):
            checked(lengths, assignment, mesh)


def test_byted_lengths_have_the_published_statistics() -> None:
    lengths = class_lengths(BYTED, 2_000_000, 1 << 30)
    assert sum(BYTED.values()) == pytest.approx(1)
    assert np.mean(lengths <= 4 * K) == pytest.approx(0.8, abs=0.03)
    assert np.mean(lengths >= LONGEST_CLASS) == pytest.approx(0.0005, rel=0.15)
    assert np.mean(lengths >= 128 * K) == pytest.approx(0.01, rel=0.4)
    for shortest, share in ((128 * K, 0.443), (256 * K, 0.37), (LONGEST_CLASS, 0.121)):
        assert token_share(lengths, shortest) == pytest.approx(share, rel=0.1)


def test_github_lengths_have_the_published_statistics() -> None:
    lengths = class_lengths(GITHUB, 2_000_000, 1 << 30)
    assert sum(GITHUB.values()) == pytest.approx(1)
    for shortest, share in ((128 * K, 0.162), (256 * K, 0.098), (512 * K, 0.053)):
        assert token_share(lengths, shortest) == pytest.approx(share, rel=0.1)


def token_share(lengths: Int64Array, shortest: int) -> float:
    return float(lengths[lengths >= shortest].sum() / lengths.sum())


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_exactly_its_tokens(name: str) -> None:
    lengths = STEPS[name](1 << 20, 50_000, 7)
    assert int(lengths.sum()) == 1 << 20
    assert lengths.dtype == np.int64
    assert 1 <= lengths.min() <= lengths.max() <= 50_000
    assert (lengths == STEPS[name](1 << 20, 50_000, 7)).all()
    assert not np.array_equal(lengths, STEPS[name](1 << 20, 50_000, 8))


@pytest.fixture(scope="module")
def results() -> Results:
    return planner.measured(TINY)


def test_every_figure_is_there(results: Results) -> None:
    figures = Counter(r.figure for r in results.ratios)
    once = ("gap_free_median", "gap_free_worst", "gap_free_links_median", "gap_free_links_worst")
    waves = ("gap_waves_linear_worst", "gap_waves_quadratic_worst", "fill_waves")
    for figure in (*once, *waves, "excess_vs_algorithm2"):
        assert figures[figure] == 1, figure
    for figure in (*(f.name for f in FIGURES), "stages_loader"):
        assert figures[figure] == len(planner.SHAPES), figure
    assert figures["gap_12288"] == figures["plan_ms_12288"] == 4
    assert figures["gap_1024"] == figures["plan_ms_1024"] == 2


def test_figures_follow_from_rows(results: Results) -> None:
    names = [r.name for r in results.rows]
    assert len(set(names)) == len(names)
    values = {f"{r.name}:{name}": count for r in results.rows for name, count in r.counts.items()}
    assert [r.figure for r in results.ratios if r.value is None] == ["stages_loader"] * len(planner.SHAPES)
    for each in results.ratios:
        if each.value is not None:
            assert each.value == values[each.numerator] / values[each.denominator]


def test_no_plan_beats_the_bound(results: Results) -> None:
    gaps = [r for r in results.rows if r.unit == "makespan/bound"]
    assert len(gaps) > 20
    assert all(r.low is not None and r.low >= 1 for r in gaps)
    figures = {r.figure: r.value for r in results.ratios}
    assert figures["fill_waves"] is not None
    assert 0 < figures["fill_waves"] <= 1
