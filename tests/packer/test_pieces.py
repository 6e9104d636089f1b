import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.pieces import (
    chunk_sizes,
    largest_document,
    piece_pairs,
    piece_ranges,
    piece_tokens,
    smallest_rings,
)


@given(st.integers(0, 300), st.integers(1, 9))
def test_the_pieces_of_a_ring_are_the_document(length: int, ring_size: int) -> None:
    tokens: list[int] = []
    for index in range(ring_size):
        ranges = piece_ranges(length, ring_size, index)
        tokens += [position for start, stop in ranges for position in range(start, stop)]
        assert piece_tokens(length, ring_size, index) == sum(stop - start for start, stop in ranges)
        queries = [position for start, stop in ranges for position in range(start, stop)]
        assert piece_pairs(length, ring_size, index) == sum(position + 1 for position in queries)
    assert sorted(tokens) == list(range(length))
    sizes = chunk_sizes(length, ring_size)
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 2000), st.integers(1, 16))
def test_members_have_nearly_the_same_work(length: int, ring_size: int) -> None:
    pairs = [piece_pairs(length, ring_size, index) for index in range(ring_size)]
    tokens = [piece_tokens(length, ring_size, index) for index in range(ring_size)]
    assert max(tokens) - min(tokens) <= 2
    assert max(pairs) - min(pairs) <= 2 * length + 2


def test_chunks_of_a_length_that_nothing_divides() -> None:
    assert chunk_sizes(7, 2) == (1, 2, 2, 2)
    assert piece_ranges(7, 2, 0) == ((0, 1), (5, 7))
    assert piece_ranges(7, 2, 1) == ((1, 3), (3, 5))


@given(st.lists(st.integers(0, 400), max_size=10), st.integers(1, 50))
def test_the_smallest_ring_is_the_first_that_fits(lengths: list[int], capacity: int) -> None:
    def fits(length: int, ring_size: int) -> bool:
        return all(piece_tokens(length, ring_size, index) <= capacity for index in range(ring_size))

    expected = [next(d for d in range(1, 500) if fits(length, d)) for length in lengths if capacity > 1 or length < 2]
    if len(expected) == len(lengths):
        assert smallest_rings(np.array(lengths, np.int64), capacity).tolist() == expected


@given(st.integers(1, 12), st.integers(1, 60))
def test_every_document_up_to_the_largest_fits(ranks: int, capacity: int) -> None:
    lengths = np.arange(largest_document(ranks, capacity) + 1)
    assert smallest_rings(lengths, capacity).max() <= ranks
