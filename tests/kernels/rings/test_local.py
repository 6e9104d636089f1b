"""Runs of whole documents hold every row that no piece does, with the bounds that the pack gives them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from seqmesh.kernels.backends.base import Segments
from seqmesh.kernels.layout import Ring
from seqmesh.kernels.rings.local import local_runs
from tests.kernels.reference import layout_of

SEGMENTS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12)


@given(segments=SEGMENTS, padding=st.integers(0, 3))
def test_runs_and_pieces_are_the_whole_pack(segments: list[tuple[int, bool]], padding: int) -> None:
    lengths = [length for length, _ in segments]
    starts = list(accumulate(lengths, initial=0))
    rings = [
        Ring(segment=i, start=starts[i], ranks=(0, 1), index=0, chunks=(length, 0, 0, 0))
        for i, (length, spread) in enumerate(segments)
        if spread
    ]
    layout = replace(layout_of(lengths), rings=tuple(rings))
    runs = list(local_runs(layout, rings[::-1], starts[-1] + padding))
    bounds = [[rows.start + row for row in inside.cu_q.tolist()] for rows, inside in runs]
    spans = [span for run in bounds for span in pairwise(run) if span[0] < span[1]]
    whole = [(starts[i], starts[i + 1]) for i, (length, spread) in enumerate(segments) if length and not spread]
    assert spans == whole
    for (run, inside), ends in zip(runs, bounds, strict=True):
        assert run.start == ends[0]
        assert run.stop - run.start > 0
        assert max(stop - start for start, stop in pairwise(ends)) <= inside.max_q <= run.stop - run.start
        assert inside == Segments.of_themselves(inside.cu_q, inside.max_q)
        assert inside.cu_q.dtype == layout.cu_seqlens.dtype
    rows = [row for run, _ in runs for row in range(run.start, run.stop)]
    pieces = [row for ring in rings for row in range(ring.rows.start, ring.rows.stop)]
    assert not set(rows) & set(pieces)
    assert sorted(rows + pieces)[: starts[-1]] == list(range(starts[-1]))
