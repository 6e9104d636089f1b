import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.makespan import timeline
from seqmesh.packer.pieces import piece_pairs, piece_tokens
from seqmesh.packer.pipeline import pipeline_bound, pipelined
from tests.packer.reference_pipeline import Piece, finish_times

COST = CostModel(fixed=7, linear=100, quadratic=2)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Piece], int]:
    """Documents on one rank or on a ring of any ranks, in any micro-batch: with holes, and different counts."""
    ranks = draw(st.integers(1, 4))
    rings = st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks)
    documents = draw(st.lists(st.tuples(st.integers(0, 5), rings), max_size=12))
    pieces = [
        Piece(rank, wave, document, draw(st.integers(0, 50)))
        for document, (wave, ring) in enumerate(documents)
        for rank in ring
    ]
    return sorted(pieces), ranks


def columns(pieces: Sequence[Piece]) -> dict[str, Int64Array]:
    """Of a plan, as the simulation takes them."""
    table = np.array(pieces, np.int64).reshape(-1, 4)
    sizes = np.bincount(table[:, 2], minlength=1)
    return {
        "rank": table[:, 0].copy(),
        "wave": table[:, 1].copy(),
        "document": table[:, 2].copy(),
        "ring_size": sizes[table[:, 2]],
        "costs": table[:, 3].copy(),
    }


def makespan(pieces: Sequence[Piece], ranks: int, stages: int) -> int:
    _, ends = pipelined(ranks=ranks, stages=stages, **columns(pieces))
    return int(ends.max(initial=0))


def in_turn(times: Sequence[int], rank: int = 0) -> list[Piece]:
    """Whole documents, one to a micro-batch."""
    return [Piece(rank, wave, 1000 * rank + wave, time) for wave, time in enumerate(times)]


@settings(max_examples=200)
@given(plans(), st.integers(1, 5))
def test_times_are_those_of_the_obvious_schedule(case: tuple[list[Piece], int], stages: int) -> None:
    pieces, ranks = case
    begins, ends = pipelined(ranks=ranks, stages=stages, **columns(pieces))
    expected = finish_times(pieces, ranks, stages)
    for piece, begin, end in zip(pieces, begins.tolist(), ends.tolist(), strict=True):
        exact = expected[piece.rank, piece.wave]
        assert (begin, end) == (math.floor(exact[0]), math.ceil(exact[1]))


@given(plans())
def test_one_stage_is_no_pipeline(case: tuple[list[Piece], int]) -> None:
    pieces, ranks = case
    simple = timeline(ranks=ranks, barrier=False, **columns(pieces))
    assert np.array_equal(pipelined(ranks=ranks, stages=1, **columns(pieces)), simple)


@given(st.integers(1, 30), st.integers(0, 1000), st.integers(1, 9))
def test_equal_micro_batches_take_as_many_turns_as_they_and_the_other_stages_are(
    count: int, time: int, stages: int
) -> None:
    assert makespan(in_turn([time] * count), 1, stages) == -(-(count + stages - 1) * time // stages)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 9))
def test_unequal_ones_take_no_longer_than_if_all_were_as_dear_as_the_dearest(times: list[int], stages: int) -> None:
    found = makespan(in_turn(times), 1, stages)
    assert found <= -(-(len(times) + stages - 1) * max(times) // stages)
    assert found * stages >= sum(times)
    assert found >= max(times)


def test_a_rings_members_wait_for_each_other_on_every_stage() -> None:
    """Rank 1 has nothing before the ring, and ends with rank 0; alone it would be done after 40."""
    pieces = [Piece(0, 0, 0, 60), Piece(0, 1, 1, 30), Piece(1, 1, 1, 40)]
    begins, ends = pipelined(ranks=2, stages=2, **columns(pieces))
    assert begins.tolist() == [0, 10, 10]
    assert ends.tolist() == [60, 74, 74]  # 73 ⅓


def test_levels_in_pipelines_of_their_own_stay_near_the_bound() -> None:
    """8 micro-batches of 36 in one pipeline and 18 of 16 in the other: the same work, 144 to each of two stages. Mixed
    in turn in both, a stage waits for its neighbour at every change of level."""
    lengths = np.array([36] * 8 + [16] * 18, np.int64)
    mixed = [36, 16, 16, 36, 16, 16, 16, 36, 16, 16, 36, 16, 16]
    found = [makespan(in_turn(times), 1, 2) for times in ([36] * 8, [16] * 18, mixed)]
    assert [sum(times) for times in ([36] * 8, [16] * 18, mixed)] == [288] * 3
    assert found == [9 * 18, 19 * 8, 192]
    assert makespan(in_turn([36] * 8) + in_turn([16] * 18, rank=1), 2, 2) == max(found[:2])
    assert pipeline_bound(lengths, 2, 36, CostModel(), 2, per_node=2) == 148


def test_nothing_takes_no_time() -> None:
    assert makespan([], 3, 4) == 0
    assert pipeline_bound(np.zeros(0, np.int64), 3, 10, COST, 4, per_node=3) == 0


def test_costs_over_62_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="too large for 4 stages: use a coarser unit"):
        makespan(in_turn([1 << 60]), 1, 4)


def spread_out(lengths: Sequence[int], rings: Sequence[tuple[int, ...]], waves: Sequence[int]) -> list[Piece]:
    """The pieces of documents on these rings, in these waves; the first of a micro-batch carries the fixed cost."""
    pieces = sorted(
        Piece(rank, wave, document, 100 * piece_tokens(*place) + 2 * piece_pairs(*place))
        for document, (length, ring, wave) in enumerate(zip(lengths, rings, waves, strict=True))
        for index, rank in enumerate(ring)
        for place in [(length, len(ring), index)]
    )
    first = {(piece.rank, piece.wave): at for at, piece in reversed(list(enumerate(pieces)))}
    return [p._replace(cost=p.cost + 7 * (first[p.rank, p.wave] == at)) for at, p in enumerate(pieces)]


@settings(max_examples=5)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(1, 4))
def test_the_bound_is_below_the_best_of_all_plans(lengths: list[int], stages: int) -> None:
    """All rings of two ranks and all micro-batches for each document: nothing beats the bound."""
    choices = list(product([(0,), (1,), (0, 1), (1, 0)], range(len(lengths))))
    best = min(
        makespan(spread_out(lengths, *zip(*chosen, strict=True)), 2, stages)
        for chosen in product(choices, repeat=len(lengths))
    )
    assert 0 < pipeline_bound(np.array(lengths, np.int64), 2, 100, COST, stages, per_node=2) <= best


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_bound_is_met_where_one_document_is_all(stages: int) -> None:
    bound = pipeline_bound(np.array([10], np.int64), 1, 100, COST, stages, per_node=1)
    assert bound == makespan([Piece(0, 0, 0, 7 + 1000 + 110)], 1, stages) == 1117
