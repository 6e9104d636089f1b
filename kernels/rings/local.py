"""The rows of a pack that are whole documents: contiguous runs of segments between the pieces of spread ones.

Which rows these are is known without reading cu_seqlens, so on a device nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from seqmesh.kernels.layout import Layout, Ring


@dataclass(frozen=True, slots=True)
class Run:
    """rows: of the pack. cu_seqlens [N + 1] int32: bounds of its segments, counted from its first row. longest: at
    least the rows of its longest segment. Padding after the last segment of all belongs to the last run."""

    rows: slice
    cu_seqlens: Tensor
    longest: int


def local_runs(layout: Layout, rings: Sequence[Ring], rows: int) -> Iterator[Run]:
    """The runs between the pieces of `rings` in a pack of so many rows, those without rows or segments left out."""
    pieces = [(ring.segment, ring.rows.start, ring.rows.stop) for ring in sorted(rings, key=lambda ring: ring.segment)]
    segment, first = 0, 0
    for piece, start, stop in [*pieces, (len(layout.cu_seqlens) - 1, rows, rows)]:
        if segment < piece and first < start:
            bounds = layout.cu_seqlens[segment : piece + 1]
            yield Run(slice(first, start), bounds - bounds[0], min(layout.max_seqlen, start - first))
        segment, first = piece + 1, stop
