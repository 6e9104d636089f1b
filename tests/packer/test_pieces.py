import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.packer.pieces import (
    chunk_sizes,
    largest_document,
    piece_pairs,
    piece_ranges,
    piece_tokens,
    rows_sent,
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


@given(st.integers(0, 60), st.integers(1, 6))
def test_rows_sent_are_the_keys_seen_and_not_held(length: int, ring_size: int) -> None:
    holders = [
        [p for start, stop in piece_ranges(length, ring_size, i) for p in range(start, stop)] for i in range(ring_size)
    ]
    # A chunk travels whole: member i needs the chunk of key p if any of its queries comes after the chunk's first key.
    sizes = chunk_sizes(length, ring_size)
    expected = sum(
        sizes[chunk]
        for member in range(ring_size)
        for chunk in range(2 * ring_size)
        if chunk not in (member, 2 * ring_size - 1 - member) and chunk < 2 * ring_size - 1 - member
    )
    assert rows_sent(length, ring_size) == expected
    assert sorted(p for held in holders for p in held) == list(range(length))


def test_rows_sent_of_many_documents_at_once() -> None:
    lengths, rings = np.array([7, 50, 33]), np.array([1, 3, 4])
    assert rows_sent(lengths, rings).tolist() == [rows_sent(7, 1), rows_sent(50, 3), rows_sent(33, 4)]


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
