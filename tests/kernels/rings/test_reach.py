"""What a member gathers, compared with sets of tokens written down one by one."""

from __future__ import annotations

from itertools import accumulate, product

from hypothesis import given
from hypothesis import strategies as st

from seqmesh.kernels.layout import Ring
from seqmesh.kernels.rings.reach import Reach, reach_of
from seqmesh.packer.pieces import chunk_sizes, piece_rows, rows_sent

CHUNKS = st.integers(1, 6).flatmap(lambda size: st.lists(st.integers(0, 4), min_size=2 * size, max_size=2 * size))
WINDOWS = st.one_of(st.none(), st.integers(1, 60))


def ring_of(chunks: tuple[int, ...], index: int) -> Ring:
    return Ring(segment=0, start=0, ranks=tuple(range(len(chunks) // 2)), index=index, chunks=chunks)


def held(chunks: tuple[int, ...]) -> list[list[int]]:
    """Each member's tokens, in the order of its piece."""
    starts, count = list(accumulate(chunks, initial=0)), len(chunks)
    return [
        [token for chunk in (i, count - 1 - i) for token in range(starts[chunk], starts[chunk + 1])]
        for i in range(count // 2)
    ]


def seen_by(query: int, length: int, causal: bool, window: int | None) -> list[int]:
    if not causal:
        return list(range(length))
    return [key for key in range(query + 1) if window is None or query - key < window]


def pick(tokens: list[int], slices: tuple[slice, ...]) -> list[int]:
    return [token for rows in slices for token in tokens[rows]]


def gathered(reach: Reach, pieces: list[list[int]], index: int, reaches: list[Reach]) -> list[int]:
    """The tokens of the gathered rows, put together from what the others send."""
    rows = [-1] * reach.keys
    for member, piece in enumerate(pieces):
        slices = reach.own if member == index else reach.received[member]
        sent = iter(piece if member == index else pick(piece, reaches[member].sent[index]))
        for part in slices:
            rows[part] = [next(sent) for _ in rows[part]]
        assert next(sent, None) is None
    return rows


def check(chunks: tuple[int, ...], causal: bool, window: int | None) -> None:
    length, pieces = sum(chunks), held(chunks)
    reaches = [reach_of(ring_of(chunks, i), causal=causal, window=window) for i in range(len(pieces))]
    for index, (reach, piece) in enumerate(zip(reaches, pieces, strict=True)):
        wanted = {key for query in piece for key in seen_by(query, length, causal, window)}
        rows = gathered(reach, pieces, index, reaches)
        assert rows == sorted(wanted)  # no key twice, none that nobody sees, in order
        assert [query for queries, _ in reach.calls for query in piece[queries]] == piece
        for queries, keys in reach.calls:  # what a back end makes of a call: the last key beside the last query
            own, others = piece[queries], rows[keys]
            for row, query in enumerate(own):
                at = row + len(others) - len(own)
                visible = others[max(0, at + 1 - (window or at + 1)) : at + 1] if causal else others
                assert visible == seen_by(query, length, causal, window)
        assert all(len(slices) <= 2 for slices in (*reach.sent, *reach.received, reach.own))


@given(chunks=CHUNKS, window=WINDOWS)
def test_a_member_gathers_just_the_keys_that_it_sees(chunks: list[int], window: int | None) -> None:
    check(tuple(chunks), True, window)
    check(tuple(chunks), False, None)


def test_every_short_document_with_every_window() -> None:
    for size, length, window in product(range(1, 5), range(13), (None, 1, 2, 3, 4, 7, 12, 13)):
        check(chunk_sizes(length, size), True, window)


@given(length=st.integers(0, 300), size=st.integers(1, 8), window=st.one_of(st.none(), st.integers(1, 400)))
def test_rows_received_are_those_that_the_packer_counts(length: int, size: int, window: int | None) -> None:
    chunks, received = chunk_sizes(length, size), 0
    for index in range(size):
        reach = reach_of(ring_of(chunks, index), causal=True, window=window)
        rows = sum(part.stop - part.start for slices in reach.received for part in slices)
        assert rows == piece_rows(length, size, index, window)
        received += rows
    if window is None and length >= 2 * size:
        assert received == rows_sent(length, size)


def test_a_window_moves_hardly_any_keys() -> None:
    """Halos: 63 keys before each of a member's two chunks, where without a window all before them are moved."""
    pieces = [int(piece_rows(4096, 8, index, 64)) for index in range(8)]
    assert max(pieces) == 126
    assert sum(pieces) <= 0.05 * rows_sent(4096, 8)
