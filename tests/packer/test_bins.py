from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.packer.best_fit import best_fit
from seqmesh.packer.bins import IN_ORDER, METHODS, Bins, pack
from seqmesh.packer.bounds import martello_toth
from seqmesh.packer.rooms import LARGEST_INDEX
from tests.packer import reference_bins as reference
from tests.packer.reference import best_fit_decreasing

VAST = LARGEST_INDEX * 1000 + 7


@st.composite
def packing_cases(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths and a capacity that holds each of them; capacities around powers of the index's word size, and beyond
    the largest index, too."""
    capacity = draw(
        st.one_of(st.integers(1, 100), st.sampled_from([63, 64, 65, 4095, 4096, 4097, 8191, 262143, 262145, VAST]))
    )
    length = st.one_of(
        st.integers(0, capacity),
        st.sampled_from(sorted({0, 1, capacity // 3, capacity // 2, min(capacity // 2 + 1, capacity), capacity})),
    )
    return draw(st.lists(length, max_size=60)), capacity


@st.composite
def limited_cases(draw: st.DrawFn) -> reference.Case:
    lengths, capacity = draw(packing_cases())
    extra = draw(st.none() | st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    return reference.Case(
        sizes=lengths,
        capacity=capacity,
        max_documents=draw(st.sampled_from([1, 2, 3, 10**9])),
        extra=extra,
        extra_capacity=draw(st.integers(9, 30)),
    )


def packed(case: reference.Case, method: str, **options: Any) -> Bins:
    second: dict[str, Any] = {} if case.extra is None else {"extra": case.extra, "extra_capacity": case.extra_capacity}
    return pack(case.sizes, case.capacity, method=method, max_documents=case.max_documents, **second, **options)


def check(bins: Bins, lengths: list[int]) -> None:
    """Every token of what was packed in exactly one bin, no bin over or empty, and both outputs agree."""
    sizes = -(-bins.lengths // bins.multiple) * bins.multiple
    kept = np.flatnonzero(bins.bin_of >= 0)
    assert sorted(bins.order.tolist()) == kept.tolist()
    assert bins.offsets[0] == 0
    for index in range(bins.count):
        pieces = bins.pieces(index)
        assert len(pieces) > 0
        assert (bins.bin_of[pieces] == index).all()
        assert bins.documents(index).tolist() == bins.document[pieces].tolist()
        assert int(sizes[pieces].sum()) <= bins.capacity
    ends = bins.start + bins.lengths
    assert (ends <= np.array(lengths, np.int64)[bins.document]).all()
    assert bins.tokens == int(bins.lengths[kept].sum()) == sum(lengths) - bins.cut_tokens
    assert bins.bound <= bins.count
    for array in (bins.bin_of, bins.order, bins.offsets, bins.document, bins.start, bins.lengths):
        assert array.dtype == np.int64


@given(packing_cases())
def test_best_fit_decreasing_fills_the_same_bins_as_the_textbook(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    loads = [0] * (bins := pack(lengths, capacity)).count
    for document, chosen in enumerate(bins.bin_of.tolist()):
        loads[chosen] += lengths[document]
    assert sorted(loads) == sorted(best_fit_decreasing(lengths, capacity))


@given(limited_cases())
def test_best_fit_takes_the_fullest_bin_within_all_limits(case: reference.Case) -> None:
    assert reference.is_best_fit(case, packed(case, "best_fit_decreasing").bin_of.tolist())


@given(limited_cases())
def test_first_fit_and_next_fit_are_those_of_the_textbook(case: reference.Case) -> None:
    by_index = list(range(len(case.sizes)))
    by_size = sorted(by_index, key=lambda document: -case.sizes[document])
    assert packed(case, "first_fit").bin_of.tolist() == reference.first_fit(case, by_index)
    assert packed(case, "first_fit_decreasing").bin_of.tolist() == reference.first_fit(case, by_size)
    assert packed(case, "next_fit").bin_of.tolist() == reference.next_fit(case)


@given(limited_cases(), st.integers(0, 70))
def test_order_keeping_takes_the_longest_in_sight(case: reference.Case, lookahead: int) -> None:
    bins = packed(case, "order_keeping", lookahead=lookahead)
    assert bins.bin_of.tolist() == reference.order_keeping(case, lookahead)
    firsts = [int(bins.pieces(index)[0]) for index in range(bins.count)]
    assert firsts == sorted(firsts)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 12), st.integers(1, 4))
def test_concat_cuts_the_stream_of_tokens(lengths: list[int], capacity: int, multiple: int) -> None:
    capacity = max(capacity, multiple)
    bins = pack(lengths, capacity, method="concat", multiple=multiple)
    expected = reference.concat(lengths, capacity - capacity % multiple, multiple)
    for index, tokens in enumerate(expected):
        real = [token for token in tokens if token[1] >= 0]
        found = [
            (int(bins.document[piece]), position)
            for piece in bins.pieces(index)
            for position in range(bins.start[piece], bins.start[piece] + bins.lengths[piece])
        ]
        assert found == real
    assert bins.count == max(len(expected), min(len(lengths), 1))  # documents of no tokens are in a bin too
    assert bins.cut_tokens == 0


@pytest.mark.parametrize("method", METHODS)
@given(
    case=packing_cases(),
    overlong=st.sampled_from(["truncate", "split", "drop"]),
    shorter=st.integers(1, 5),
    multiple=st.sampled_from([1, 1, 2, 7, 16]),
    max_documents=st.sampled_from([None, 1, 3]),
    seed=st.sampled_from([None, 0, 5]),
)
def test_every_method_keeps_every_token_it_says_it_keeps(
    method: str,
    case: tuple[list[int], int],
    overlong: str,
    shorter: int,
    multiple: int,
    max_documents: int | None,
    seed: int | None,
) -> None:
    lengths, capacity = case
    capacity = max(capacity // shorter, multiple)
    bins = pack(
        lengths,
        capacity,
        method=method,
        overlong=overlong,
        multiple=multiple,
        max_documents=max_documents,
        seed=seed,
    )
    check(bins, lengths)
    longest = capacity - capacity % multiple
    if overlong == "split" or method != "concat":
        tokens = {"truncate": sum(min(length, longest) for length in lengths), "split": sum(lengths)}
        tokens["drop"] = sum(length for length in lengths if length <= longest)
        assert bins.tokens == tokens[overlong]
    if overlong == "split":
        whole = sorted(zip(bins.document.tolist(), bins.start.tolist(), bins.lengths.tolist(), strict=True))
        for document, length in enumerate(lengths):  # the pieces of a document follow each other without a gap
            mine = [(start, tokens) for of, start, tokens in whole if of == document]
            assert [start for start, _ in mine] == list(np.cumsum([0] + [tokens for _, tokens in mine])[:-1])
            assert sum(tokens for _, tokens in mine) == length
    if max_documents is not None and bins.count:
        assert int(np.diff(bins.offsets).max()) <= max_documents


@pytest.mark.parametrize("method", METHODS)
@given(case=packing_cases(), ranks=st.integers(1, 9))
def test_the_number_of_bins_can_be_a_multiple_of_the_ranks(
    method: str, case: tuple[list[int], int], ranks: int
) -> None:
    lengths, capacity = case
    pieces = len(pack(lengths, capacity, method=method).lengths)
    plain = pack(lengths, capacity, method=method).count
    target = -(-plain // ranks) * ranks
    if target > pieces:
        with pytest.raises(ValueError, match=f"{pieces} pieces do not make {target} bins without an empty one"):
            pack(lengths, capacity, method=method, bins_multiple=ranks)
        return
    bins = pack(lengths, capacity, method=method, bins_multiple=ranks)
    check(bins, lengths)
    assert bins.count == target
    if method in IN_ORDER:
        firsts = [int(bins.pieces(index)[0]) for index in range(bins.count)]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("method", METHODS)
@given(case=packing_cases(), dtype=st.sampled_from(["int32", "uint32", "uint64", "int64"]))
def test_the_answer_does_not_depend_on_dtype_stride_run_or_whether_it_is_read_only(
    method: str, case: tuple[list[int], int], dtype: str
) -> None:
    lengths, capacity = case
    wide = dtype if max(lengths, default=0) < 2**31 else "int64"
    strided = np.repeat(np.array(lengths, wide), 2)[::2]
    strided.flags.writeable = False
    first, second = pack(lengths, capacity, method=method), pack(strided, capacity, method=method)
    assert first.order.tolist() == second.order.tolist()
    assert first.offsets.tolist() == second.offsets.tolist()


def web_like(documents: int, longest: int) -> npt.NDArray[np.int64]:
    return np.clip(np.random.default_rng(1).lognormal(6.4, 1.5, documents), 1, longest).astype(np.int64)


def test_large_random_packings_match_the_textbook() -> None:
    for capacity in (500, 4096, 70_000):
        lengths = web_like(1500, capacity)
        assert pack(lengths, capacity).count == len(best_fit_decreasing(lengths.tolist(), capacity))


def test_small_optima_are_nearly_always_reached() -> None:
    rng = np.random.default_rng(3)
    equal, cases = 0, 60
    for _ in range(cases):
        capacity = int(rng.integers(10, 100))
        lengths = rng.integers(1, capacity + 1, int(rng.integers(4, 13))).tolist()
        fewest, found = reference.fewest_bins(lengths, capacity), pack(lengths, capacity)
        assert found.bound <= fewest <= found.count
        assert 9 * found.count <= 11 * fewest + 6
        equal += found.count == fewest
    assert equal >= 0.9 * cases


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 20))
@settings(max_examples=30)
def test_the_bound_is_under_the_optimum(lengths: list[int], spare: int) -> None:
    capacity = max(lengths) + spare
    assert martello_toth(np.array(lengths, np.int64), capacity) <= reference.fewest_bins(lengths, capacity)


def test_the_bound_knows_that_halves_do_not_share() -> None:
    assert martello_toth(np.array([6, 6, 6, 4, 4, 4]), 11) == 3
    assert martello_toth(np.array([6, 6, 6]), 11) == 3
    assert martello_toth(np.array([7, 7, 4, 4, 4]), 11) == 3
    assert pack([1] * 9, 100, max_documents=2).bound == 5
    assert pack([1] * 9, 100, extra=[3] * 9, extra_capacity=7).bound == 4


def test_a_seed_gives_other_neighbours_in_each_epoch_and_the_same_answer_every_time() -> None:
    lengths = web_like(2000, 4096)
    epochs = [pack(lengths, 4096, seed=7, epoch=epoch) for epoch in (0, 1, 1)]
    assert epochs[1].bin_of.tolist() == epochs[2].bin_of.tolist()
    assert max(bins.count for bins in epochs) <= epochs[0].bound + 8

    def neighbours(bins: Bins) -> set[tuple[int, int]]:
        return {(int(a), int(b)) for a, b in zip(bins.order, bins.order[1:], strict=False)}

    assert len(neighbours(epochs[0]) & neighbours(epochs[1])) < 40


def test_shuffled_bins_do_not_tell_their_lengths() -> None:
    lengths = web_like(30_000, 8192)
    sorted_bins, shuffled = (pack(lengths, 8192, method=f"best_fit_{how}") for how in ("decreasing", "shuffled"))
    assert sorted_bins.count == shuffled.count

    def correlation(bins: Bins) -> float:
        means = np.bincount(bins.bin_of, weights=lengths) / np.bincount(bins.bin_of)
        return abs(float(np.corrcoef(np.arange(bins.count), means)[0, 1]))

    assert correlation(sorted_bins) > 0.5
    assert correlation(shuffled) < 0.03


def test_lengths_beyond_31_bits() -> None:
    huge = 2**31 + 5
    for method in METHODS:
        bins = pack([huge, 3, huge, 2**40], 2**40 + 4, method=method)
        check(bins, [huge, 3, huge, 2**40])
        assert bins.count == 2


def test_a_vast_capacity_needs_no_vast_memory() -> None:
    for method in METHODS:
        assert pack([5, 6, 7], 2**60, method=method).count == 1


def test_fill_is_tokens_over_room() -> None:
    assert pack([3, 3, 3], 4).fill == 9 / 12
    assert pack([3, 3, 3], 4, multiple=4).fill == 9 / 12
    assert pack([], 4).fill == 1.0


@given(packing_cases(), st.data())
def test_bins_that_are_partly_full_are_used_first(case: tuple[list[int], int], data: st.DataObject) -> None:
    lengths, capacity = case
    if capacity == VAST:
        return
    rooms = data.draw(st.lists(st.integers(0, capacity), max_size=8))
    bin_of, count = best_fit(np.array(lengths, np.int64), capacity, np.array(rooms, np.int64))
    left = rooms + [capacity] * (count - len(rooms))
    for document, chosen in enumerate(bin_of.tolist()):
        left[chosen] -= lengths[document]
    assert min(left, default=0) >= 0
    assert all(room < capacity for room in left[len(rooms) :]) or 0 in lengths


@pytest.mark.parametrize(
    ("lengths", "capacity", "options", "message"),
    [
        ([1], 0, {}, "capacity is 0: must be at least 1"),
        ([1], -5, {}, "capacity is -5: must be at least 1"),
        ([3, 9, 4], 8, {}, r"document 1 has 9 tokens: more than a bin holds, 8 \(1 such documents\); choose overlong="),
        ([3, -9], 8, {}, r"lengths\[1\] is -9"),
        ([3.5], 8, {}, "lengths has dtype float64: must be integers"),
        ([3], 8, {"method": "magic"}, "method is 'magic': must be one of best_fit_decreasing"),
        ([3], 8, {"overlong": "ignore"}, "overlong is 'ignore': must be one of error, truncate, split, drop"),
        ([3], 8, {"multiple": 9}, "multiple is 9: must not be over the capacity, 8"),
        ([3], 8, {"multiple": 0}, "multiple is 0: must be at least 1"),
        ([7], 7, {"multiple": 4}, "document 0 has 7 tokens: more than a bin holds, 4"),
        ([3], 8, {"max_documents": 0}, "max_documents is 0: must be at least 1"),
        ([3], 8, {"bins_multiple": 0}, "bins_multiple is 0: must be at least 1"),
        ([3], 8, {"lookahead": -1}, "lookahead is -1: must be at least 0"),
        ([3], 8, {"extra": [1]}, "extra and extra_capacity belong together"),
        ([3], 8, {"extra": [1, 2], "extra_capacity": 4}, "extra has 2 entries for 1 documents"),
        ([3], 8, {"extra": [5], "extra_capacity": 4}, "document 0 needs 5 of extra: more than a bin has, 4"),
        ([3], 8, {"extra": [5], "extra_capacity": 4, "overlong": "split"}, "overlong='split' cuts documents"),
        ([3], 8, {"extra": [5], "extra_capacity": 4, "method": "concat"}, "method='concat' cuts documents"),
        ([3], 8, {"supervised_start": [0, 1]}, "supervised_start has 2 entries for 1 documents"),
        ([2**62, 2**62], 2**62, {}, "the sum of lengths is over"),
        ([3], 8.5, {}, "capacity is 8.5: must be an integer from 1 to"),
        ([3], "8", {}, "capacity is '8': must be an integer"),
        ([3], True, {}, "capacity is True: must be an integer"),
        ([3], 2**63, {}, "capacity is 9223372036854775808: must be an integer from 1 to"),
        ([3], 8, {"max_documents": 1.5}, "max_documents is 1.5: must be an integer"),
        ([3], 8, {"seed": 2**70}, "seed is 1180591620717411303424: must be an integer"),
        ([3], 8, {"seed": -1}, "seed is -1: must be at least 0"),
        ([[1, 2]], 8, {}, "lengths has 2 dimensions: must have one"),
        ([True], 8, {}, "lengths has dtype bool: must be integers"),
    ],
)
def test_bad_input_is_refused(lengths: list[Any], capacity: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, capacity, **options)


def test_overlong_by_the_second_resource_can_be_dropped() -> None:
    bins = pack([3, 3, 3], 8, extra=[5, 1, 1], extra_capacity=4, overlong="drop")
    assert (bins.overlong.tolist(), bins.bin_of.tolist(), bins.cut_tokens) == ([0], [-1, 0, 0], 3)
