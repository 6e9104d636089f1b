"""What members compute with each other's blocks, compared with all pairs of a document."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.kernels.rings.circuit import visible_block
from tests.kernels.rings.test_reach import CHUNKS, held, ring_of


@given(chunks=CHUNKS, causal=st.booleans())
def test_members_compute_every_visible_pair_once(chunks: list[int], causal: bool) -> None:
    pieces, tokens = held(tuple(chunks)), sum(chunks)
    ring = ring_of(tuple(chunks), 0)
    count = torch.zeros(tokens, tokens, dtype=torch.int64)
    for i, piece in enumerate(pieces):
        for row, query in enumerate(piece):  # inside the segment: causal by row
            count[query, piece[: row + 1] if causal else piece] += 1
        for j in set(range(len(pieces))) - {i}:
            first, keys = visible_block(ring, i, j, causal)
            for query in piece[first:]:
                count[query, pieces[j][:keys]] += 1
    assert torch.equal(count, torch.ones_like(count).tril() if causal else torch.ones_like(count))
