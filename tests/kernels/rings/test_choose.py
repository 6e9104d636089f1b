"""Short documents and windows are gathered, long documents go round, and a name is kept."""

from __future__ import annotations

import pytest

from seqmesh.kernels.rings.choose import BYTES_PER_MEMBER, choose

ROW = 4096


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_document_is_gathered_until_moving_it_costs_more_than_the_ring_would_wait(size: int) -> None:
    longest = (size - 1) * BYTES_PER_MEMBER // ROW
    assert choose("auto", size=size, tokens=longest, row_bytes=ROW, window=None) == "gather"
    assert choose("auto", size=size, tokens=longest + 1, row_bytes=ROW, window=None) == "ring"
    assert choose("auto", size=size + 1, tokens=longest + 1, row_bytes=ROW, window=None) == "gather"
    assert choose("auto", size=size, tokens=longest + 1, row_bytes=ROW // 2, window=None) == "gather"


@pytest.mark.parametrize("tokens", [0, 1 << 40])
def test_a_window_is_gathered_and_a_name_is_kept(tokens: int) -> None:
    assert choose("auto", size=8, tokens=tokens, row_bytes=ROW, window=64) == "gather"
    assert choose("ring", size=8, tokens=tokens, row_bytes=ROW, window=None) == "ring"
    assert choose("gather", size=8, tokens=tokens, row_bytes=ROW, window=None) == "gather"
