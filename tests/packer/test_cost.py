"""The cost model: pairs and rows are those that one counts by hand, costs are the formula in exact integers."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.cost import MODEL_8B, PAIR_UNITS, CostModel, Machine, ModelShape, attended_pairs
from seqmesh.packer.pieces import piece_pairs, piece_ranges, piece_rows, piece_tokens, rows_sent

LLAMA_7B = ModelShape(layers=32, width=4096, heads=32, kv_heads=32, head_width=128, ffn_width=11008, vocab_size=32000)
MACHINE = Machine(flops=4e14, near=4e11, far=5e10, launch=1e-3)

windows = st.one_of(st.none(), st.integers(1, 60))
models = st.builds(
    CostModel,
    fixed=st.integers(0, 99),
    linear=st.integers(1, 99_999),
    quadratic=st.integers(0, 99),
    row_near=st.integers(0, 99),
    row_far=st.integers(0, 999),
    window=windows,
    other_windows=st.lists(windows, max_size=3).map(tuple),
)


def seen(position: int, window: int | None) -> range:
    """Keys that the query at a position attends to."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


def held(length: int, ring_size: int, index: int) -> list[int]:
    """Positions of a member's tokens."""
    return [position for start, stop in piece_ranges(length, ring_size, index) for position in range(start, stop)]


def pairs_by_hand(length: int, ring_size: int, index: int, window: int | None) -> int:
    return sum(len(seen(query, window)) for query in held(length, ring_size, index))


def rows_by_hand(length: int, ring_size: int, index: int, window: int | None) -> int:
    own = held(length, ring_size, index)
    return len({key for query in own for key in seen(query, window)} - set(own))


@given(st.integers(0, 80), st.integers(1, 7), windows)
def test_pairs_and_rows_are_those_one_counts(length: int, ring_size: int, window: int | None) -> None:
    for index in range(ring_size):
        assert piece_pairs(length, ring_size, index, window) == pairs_by_hand(length, ring_size, index, window)
        assert piece_rows(length, ring_size, index, window) == rows_by_hand(length, ring_size, index, window)


def test_pairs_and_rows_of_every_small_case() -> None:
    """All short documents on rings that leave chunks empty, with every window that matters."""
    for length, ring_size, window in product(range(10), range(1, 6), (None, *range(1, 11))):
        for index in range(ring_size):
            case = length, ring_size, index, window
            assert piece_pairs(*case) == pairs_by_hand(*case), case
            assert piece_rows(*case) == rows_by_hand(*case), case


def test_many_pieces_at_once_are_each_alone() -> None:
    cases = np.array([(n, d, i) for n in (0, 1, 5, 17, 64) for d in (1, 2, 5) for i in range(d)], np.int64).T
    lengths, sizes, index = cases
    for window in (None, 1, 9):
        for count in (piece_pairs, piece_rows):
            alone = [count(n, d, i, window) for n, d, i in cases.T.tolist()]
            assert count(lengths, sizes, index, window).tolist() == alone


@given(st.integers(0, 500), st.integers(1, 8))
def test_a_rings_members_bring_in_what_they_send(length: int, ring_size: int) -> None:
    """Rows sent count an empty chunk's viewers too; where no chunk is empty both are the same."""
    if length >= 2 * ring_size:
        rows = sum(piece_rows(length, ring_size, index) for index in range(ring_size))
        assert rows == rows_sent(length, ring_size)


@given(st.lists(st.integers(0, 2_000_000), max_size=20), models)
def test_a_documents_cost_is_the_formula_in_exact_integers(lengths: list[int], model: CostModel) -> None:
    """The fixed cost is a micro-batch's, not a document's."""

    def pairs(length: int, window: int | None) -> int:
        inside = length if window is None else min(length, window)
        return inside * (inside + 1) // 2 + (length - inside) * inside

    layers = (model.window, *model.other_windows)
    expected = [model.linear * n + model.quadratic * sum(pairs(n, window) for window in layers) for n in lengths]
    assert model.of(np.array(lengths, np.int64)).tolist() == expected


@given(st.integers(0, 300), st.integers(1, 6), models)
def test_pieces_cost_what_they_hold_and_bring_in(length: int, ring_size: int, model: CostModel) -> None:
    index = np.arange(ring_size)
    lengths, sizes = np.full_like(index, length), np.full_like(index, ring_size)
    layers = (model.window, *model.other_windows)
    attention = [model.quadratic * sum(pairs_by_hand(length, ring_size, int(i), w) for w in layers) for i in index]
    rows = [sum(rows_by_hand(length, ring_size, int(i), w) for w in layers) for i in index]
    assert model.attention(lengths, sizes, index).tolist() == attention
    assert model.of_pieces(lengths, sizes, index).tolist() == [
        model.linear * piece_tokens(length, ring_size, int(i)) + attention[i] for i in index
    ]
    for far, price in ((0, model.row_near), (1, model.row_far)):
        assert model.traffic(lengths, sizes, index, np.full_like(index, far)).tolist() == [price * n for n in rows]


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=9), models)
def test_a_ring_of_one_costs_the_document_and_brings_nothing(lengths: list[int], model: CostModel) -> None:
    documents = np.array(lengths, np.int64)
    one, first = np.ones_like(documents), np.zeros_like(documents)
    assert model.of_pieces(documents, one, first).tolist() == model.of(documents).tolist()
    assert not model.traffic(documents, one, first, one).any()


def test_the_default_counts_tokens() -> None:
    assert CostModel().of(np.array([0, 3, 100])).tolist() == [0, 3, 100]
    assert CostModel().crossover == float("inf")


limits = st.one_of(st.none(), st.integers(1, 3000))


@given(st.integers(1, 9999), st.integers(1, 99), limits, st.lists(limits, max_size=4).map(tuple))
def test_the_terms_cross_where_their_sums_do(
    linear: int, quadratic: int, window: int | None, others: tuple[int | None, ...]
) -> None:
    model = CostModel(linear=linear, quadratic=quadratic, window=window, other_windows=others)
    crossover = model.crossover
    lengths = np.array([int(crossover), int(crossover) + 1]) if crossover < 1e9 else np.array([1 << 20, 1 << 20])
    whole, first = np.ones_like(lengths), np.zeros_like(lengths)
    below, above = (model.attention(lengths, whole, first) - linear * lengths).tolist()
    if crossover == float("inf"):
        assert None not in model.windows
        assert below < 0
    elif crossover >= 1:
        assert below <= 0 <= above


def test_a_7b_models_terms_cross_where_its_shape_says() -> None:
    """6·N FLOPs per token against 12·layers·width per pair, pairs being half of L²: L* = N / (layers · width) − 1."""
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert LLAMA_7B.flops_per_token == 6 * weights
    assert LLAMA_7B.flops_per_pair == 12 * 32 * 4096
    assert LLAMA_7B.cost_model().crossover == pytest.approx(weights / (32 * 4096) - 1, rel=1e-4)


def test_a_machine_gives_every_term_the_seconds_it_takes() -> None:
    cost = MODEL_8B.cost_model(MACHINE)
    unit = MODEL_8B.flops_per_pair / PAIR_UNITS / MACHINE.flops
    assert MODEL_8B.bytes_per_row == 32 * (8 * 128 * 2) * (2 + 2 + 4)  # keys and values twice, their gradients once
    assert cost.quadratic * unit == pytest.approx(MODEL_8B.flops_per_pair / MACHINE.flops)
    assert cost.linear * unit == pytest.approx(MODEL_8B.flops_per_token / MACHINE.flops, rel=1e-5)
    assert cost.row_near * unit == pytest.approx(MODEL_8B.bytes_per_row / MACHINE.near, rel=1e-3)
    assert cost.row_far * unit == pytest.approx(MODEL_8B.bytes_per_row / MACHINE.far, rel=1e-3)
    assert cost.fixed * unit == pytest.approx(MACHINE.launch, rel=1e-5)


def test_without_a_machine_links_and_launches_count_nothing() -> None:
    bare, timed = LLAMA_7B.cost_model(), LLAMA_7B.cost_model(MACHINE)
    assert (bare.fixed, bare.row_near, bare.row_far) == (0, 0, 0)
    assert (bare.linear, bare.quadratic) == (timed.linear, timed.quadratic)


SMALL = ModelShape(layers=12, width=8, heads=2, kv_heads=1, head_width=4, ffn_width=8, vocab_size=8)


def test_the_shapes_window_is_the_costs() -> None:
    shape = replace(SMALL, windows=(5,), number_bytes=4)
    assert shape.cost_model() == replace(SMALL.cost_model(), window=5)
    assert shape.cost_model(MACHINE).window == 5
    assert shape.bytes_per_row == 12 * 2 * 4 * (4 + 4 + 4)


def test_layers_with_different_windows_count_in_their_proportion() -> None:
    cost = replace(SMALL, windows=(7, None, 7)).cost_model()
    assert (cost.window, cost.other_windows, cost.quadratic) == (7, (7, None), PAIR_UNITS // 3)
    assert replace(SMALL, layers=4, windows=(7, None, 7)).cost_model().windows == {7: 3, None: 1}


@given(st.integers(1, 13), st.lists(windows, min_size=1, max_size=4).map(tuple), st.sampled_from([2, 3]))
def test_a_plans_unit_is_worth_the_same_in_every_term(
    layers: int, pattern: tuple[int | None, ...], mlp_matrices: int
) -> None:
    """Costs in units against FLOPs and seconds counted layer by layer; linear is rounded to a unit."""
    shape = replace(SMALL, layers=layers, windows=pattern, mlp_matrices=mlp_matrices)
    cost, length = shape.cost_model(MACHINE), 60
    each = [pattern[layer % len(pattern)] for layer in range(layers)]
    weights = layers * (8 * 4 * (2 + 2 + 1 + 1) + mlp_matrices * 8 * 8) + 8 * 8
    pairs = sum(pairs_by_hand(length, 1, 0, window) for window in each)
    flops = 6 * weights * length + 12 * 2 * 4 * pairs
    assert shape.flops(np.array([length, 0, length])) == 2 * flops
    unit = 12 * 2 * 4 * layers / cost.windows.total() / cost.quadratic  # FLOPs
    assert shape.unit_flops == pytest.approx(unit)
    lengths, one, first = np.array([length]), np.array([1]), np.array([0])
    assert cost.attention(lengths, one, first)[0] * unit == pytest.approx(12 * 2 * 4 * pairs)
    assert int(cost.of(lengths)[0]) * unit == pytest.approx(flops, abs=length * unit)
    brought = sum(rows_by_hand(length, 3, 1, window) for window in each) * shape.bytes_per_row / layers
    traffic = int(cost.traffic(lengths, np.array([3]), np.array([1]), one)[0]) * unit / MACHINE.flops
    assert traffic == pytest.approx(brought / MACHINE.far, rel=1e-2)


@given(models, st.lists(windows, min_size=1, max_size=4), st.integers(0, 80), st.integers(1, 5))
def test_costs_through_windows_are_the_mean_over_layers(
    model: CostModel, layers: list[int | None], length: int, ring_size: int
) -> None:
    plain = replace(model, window=None, other_windows=())
    index = np.arange(ring_size)
    case = np.full_like(index, length), np.full_like(index, ring_size), index
    mixed, alone = plain.through(layers), [replace(plain, window=window) for window in layers]
    assert mixed.of_pieces(*case).tolist() == np.sum([each.of_pieces(*case) for each in alone], axis=0).tolist()
    for far in (index * 0, index * 0 + 1):
        assert mixed.traffic(*case, far).tolist() == np.sum([e.traffic(*case, far) for e in alone], axis=0).tolist()
    assert mixed.fixed == plain.fixed * len(layers)
    with pytest.raises(ValueError, match="there must be none yet"):
        replace(plain, window=4).through(layers)


def test_costs_that_would_wrap_are_refused() -> None:
    with pytest.raises(ValueError, match="a document of 4000000000 tokens costs"):
        CostModel(quadratic=64).of(np.array([5, 4_000_000_000]))
    with pytest.raises(ValueError, match="sum of costs is over"):
        CostModel(quadratic=64).of(np.full(100, 200_000_000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({name: -1}, f"{name} is -1") for name in ("fixed", "linear", "quadratic", "row_near", "row_far")),
        ({"linear": 0}, "linear and quadratic are both 0"),
        ({"linear": 0, "fixed": 5}, "linear and quadratic are both 0"),
        ({"window": 0}, "window is 0: must be at least 1"),
        ({"other_windows": (None, 0)}, r"other_windows is \[None, 0\]: each must be at least 1"),
    ],
)
def test_bad_coefficients_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [("flops", 0.0), ("near", float("inf")), ("far", -1.0), ("flops", float("nan")), ("launch", -1e-3)],
)
def test_an_impossible_machine_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Machine(**{"flops": 1.0, "near": 1.0, "far": 1.0} | {field: value})


def test_pairs_of_causal_attention() -> None:
    assert attended_pairs(np.array([0, 1, 2, 65536])).tolist() == [0, 1, 3, 2147516416]


def test_traffic_of_a_whole_step_fits_62_bits_too() -> None:
    lengths = np.full(1000, 1 << 20)
    CostModel(linear=1, row_far=1 << 31).of(lengths)
    with pytest.raises(ValueError, match=r"costs and traffic come to .* over 2\*\*62: use a coarser unit"):
        CostModel(linear=1, row_far=1 << 33).of(lengths)
