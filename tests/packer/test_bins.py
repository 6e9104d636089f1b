import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.bins import METHODS, descending, pack
from tests.packer.reference import best_fit_decreasing


@st.composite
def packing_cases(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths and a capacity that holds each of them; capacities around powers of the index's word size too."""
    capacity = draw(
        st.one_of(st.integers(1, 100), st.sampled_from([63, 64, 65, 4095, 4096, 4097, 8191, 262143, 262145]))
    )
    length = st.one_of(
        st.integers(0, capacity),
        st.sampled_from(
            sorted({0, 1, capacity // 3, capacity // 2, capacity // 2 + 1, capacity} & set(range(capacity + 1)))
        ),
    )
    return draw(st.lists(length, max_size=60)), capacity


@given(packing_cases())
def test_best_fit_decreasing_fills_the_same_bins_as_the_textbook(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bins = pack(lengths, capacity)
    loads = np.bincount(bins.bin_of, weights=np.array(lengths, float), minlength=bins.count)
    assert sorted(loads.tolist()) == sorted(best_fit_decreasing(lengths, capacity))


@pytest.mark.parametrize("method", sorted(METHODS))
@given(case=packing_cases())
def test_every_document_is_in_exactly_one_bin_and_no_bin_is_over(method: str, case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bins = pack(lengths, capacity, method=method)
    assert sorted(bins.order.tolist()) == list(range(len(lengths)))
    for index in range(bins.count):
        documents = bins.documents(index)
        assert len(documents) > 0
        assert (bins.bin_of[documents] == index).all()
        assert sum(lengths[d] for d in documents) <= capacity


@given(packing_cases(), st.sampled_from(["int32", "uint32", "uint64", "int64"]))
def test_the_answer_does_not_depend_on_the_dtype_or_the_run(case: tuple[list[int], int], dtype: str) -> None:
    lengths, capacity = case
    first, second = pack(lengths, capacity), pack(np.array(lengths, dtype), capacity)
    assert first.order.tolist() == second.order.tolist()
    assert first.offsets.tolist() == second.offsets.tolist()


def test_large_random_packings_match_the_textbook() -> None:
    rng = np.random.default_rng(1)
    for capacity in (500, 4096, 70_000):
        lengths = np.minimum(rng.lognormal(5, 2, 1500).astype(np.int64), capacity)
        loads = best_fit_decreasing(lengths.tolist(), capacity)
        assert pack(lengths, capacity).count == len(loads)


def test_a_vast_capacity_needs_no_vast_memory() -> None:
    assert pack([5, 6, 7], 2**60).count == 1


def test_fill_is_tokens_over_room() -> None:
    assert pack([3, 3, 3], 4).fill == 9 / 12
    assert pack([], 4).fill == 1.0


@given(st.lists(st.integers(0, 10**9), max_size=50))
def test_descending_is_a_stable_sort(values: list[int]) -> None:
    expected = sorted(range(len(values)), key=lambda i: -values[i])
    assert descending(np.array(values, np.int64)).tolist() == expected


@pytest.mark.parametrize(
    ("lengths", "capacity", "method", "message"),
    [
        ([1], 0, "best_fit_decreasing", "capacity is 0: must be at least 1"),
        ([3, 9, 4], 8, "best_fit_decreasing", "document 1 has 9 tokens: more than the capacity, 8"),
        ([3, -9], 8, "best_fit_decreasing", r"lengths\[1\] is -9"),
        ([3], 8, "magic", "method is 'magic': must be one of best_fit_decreasing"),
    ],
)
def test_bad_input_is_refused(lengths: list[int], capacity: int, method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, capacity, method=method)
