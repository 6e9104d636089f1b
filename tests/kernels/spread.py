"""Micro-batches whose documents are spread over ranks: what each rank holds, and how to compare it with the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout, Ring
from seqmesh.packer.pieces import chunk_sizes, piece_ranges
from tests.kernels.reference import layout_of, leaves

Attend = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]


@dataclass(frozen=True, kw_only=True)
class Wave:
    """One micro-batch on every rank. rings: (length, ranks) in order. whole: lengths of documents held by one rank."""

    rings: Sequence[tuple[int, tuple[int, ...]]]
    whole: Mapping[int, Sequence[int]] = field(default_factory=dict)
    padding: int = 0

    @property
    def lengths(self) -> list[int]:
        """Of all documents: the spread ones, then those of each rank."""
        return [length for length, _ in self.rings] + [n for _, lengths in sorted(self.whole.items()) for n in lengths]

    def on(self, rank: int) -> tuple[Layout, Tensor]:
        """The rank's layout, and which row of all documents, one after the other, each of its rows is."""
        local, pieces, first = [], [], 0
        rings = [(length, members) for length, members in self.rings]
        for number, (length, members) in enumerate(rings):
            if rank in members:
                pieces.append((number, held_rows(length, members, rank) + first))
            first += length
        for holder, lengths in sorted(self.whole.items()):
            for length in lengths:
                if holder == rank:
                    local.append((-1, torch.arange(first, first + length)))
                first += length
        # The order of segments is not that of rings: pieces stand backwards between the first documents and the rest.
        segments = local[:1] + pieces[::-1] + local[1:]
        layout = layout_of([len(rows) for _, rows in segments])
        found = {number: segment for segment, (number, _) in enumerate(segments) if number >= 0}
        described = tuple(ring_of(*rings[number], rank, segment) for number, segment in sorted(found.items()))
        rows = torch.cat([rows for _, rows in segments]) if segments else torch.arange(0)
        return replace(layout, rings=described), rows


def ring_of(length: int, members: tuple[int, ...], rank: int, segment: int) -> Ring:
    """The ring of a document as one member sees it."""
    return Ring(segment, members, members.index(rank), chunk_sizes(length, len(members)))


def held_rows(length: int, members: tuple[int, ...], rank: int) -> Tensor:
    """The tokens of a document that a member holds, in its segment's order."""
    early, late = piece_ranges(length, len(members), members.index(rank))
    return torch.cat((torch.arange(*early), torch.arange(*late)))


def random_rows(rows: int, heads: tuple[int, int], width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output's gradient, the same on every rank."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, count, width) for count in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def with_nan_rows(rows: Tensor, padding: int) -> Tensor:
    return torch.cat((rows, rows.new_full((padding, *rows.shape[1:]), torch.nan)))


def run(attend: Attend, qkv: Sequence[Tensor], dout: Tensor, layout: Layout) -> list[Tensor]:
    """Output, dq, dk and dv."""
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    out = attend(q, k, v, layout)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def run_piece(wave: Wave, rank: int, inputs: Sequence[Tensor], attend: Attend = varlen_attention) -> list[Tensor]:
    """What `run` gives on a rank for its rows of the whole, with NaN in its padding."""
    layout, rows = wave.on(rank)
    *qkv, dout = (with_nan_rows(x[rows], wave.padding) for x in inputs)
    return run(attend, qkv, dout, layout)


def run_whole(wave: Wave, inputs: Sequence[Tensor], attend: Attend = varlen_attention) -> list[Tensor]:
    """What `run` gives for all documents in this process, undivided, in float64."""
    *qkv, dout = leaves(*inputs)
    return run(attend, qkv, dout.detach(), layout_of(wave.lengths))
