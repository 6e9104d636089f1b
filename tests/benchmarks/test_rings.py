"""The count of bytes, on steps small enough to follow."""

import numpy as np

from seqmesh.benchmarks.rings import REAL, ROW_BYTES, WINDOW, compare, real_lists


def test_only_documents_that_are_spread_send_anything() -> None:
    results = compare("", 2, [np.array([100, 100, 8_192, 8_192]), np.array([50, 8_200])])
    rings, static, halo = results.rows
    assert (rings.low, rings.counts["documents"]) == (0, 1)
    # Of 8,200 tokens on two ranks, member 1 gets chunk 0, member 0 gets chunk 1, and chunk 2 as well: 3/4 of the rows.
    assert rings.high == 8_200 * 3 / 4 * ROW_BYTES
    assert static.counts["documents"] == 6
    ratio, windowed = results.ratios
    assert ratio.figure == "ring_bytes_vs_static"
    assert rings.value is not None
    assert static.value is not None
    assert ratio.value == rings.value / static.value
    # In a window, member 0 gets the last rows of chunk 2, member 1 those of chunk 0.
    assert halo.high == 2 * (WINDOW - 1) * ROW_BYTES
    assert windowed.figure == "halo_vs_ring"


def test_every_real_list_is_compared() -> None:
    results = real_lists(2, steps=1)
    assert {row.case for row in results.rows} == {f"2 ranks, {name}" for name in [*REAL, "one document of 4096"]}
    assert all(ratio.value is not None and 0 < ratio.value < 1 for ratio in results.ratios)
