"""The rows of a pack that are whole documents: contiguous runs of segments between the pieces of spread ones.

Which rows these are is known without reading cu_seqlens, so on a device nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seqmesh.kernels.backends.base import Segments
from seqmesh.kernels.layout import Layout, Ring


def local_runs(layout: Layout, rings: Sequence[Ring], rows: int) -> Iterator[tuple[slice, Segments]]:
    """The runs between the pieces of `rings` in a pack of so many rows: the rows and, counted from the first of them,
    the segments of each. Runs without rows or segments are left out; padding after all segments belongs to the last."""
    pieces = [(ring.segment, ring.rows.start, ring.rows.stop) for ring in sorted(rings, key=lambda ring: ring.segment)]
    segment, first = 0, 0
    for piece, start, stop in [*pieces, (len(layout.cu_seqlens) - 1, rows, rows)]:
        if segment < piece and first < start:
            bounds = layout.cu_seqlens[segment : piece + 1]
            longest = min(layout.max_seqlen, start - first)
            yield slice(first, start), Segments.of_themselves(bounds - bounds[0], longest)
        segment, first = piece + 1, stop
