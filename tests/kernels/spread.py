"""Micro-batches whose documents are spread over ranks: what each rank holds, and attention on it under autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, zip_longest

import torch
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout, Ring
from seqmesh.packer.pieces import chunk_sizes, piece_ranges
from tests.kernels.reference import layout_of

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
        local: list[tuple[int, Tensor]] = []
        pieces: list[tuple[int, Tensor]] = []
        first = 0
        for number, (length, members) in enumerate(self.rings):
            if rank in members:
                pieces.append((number, held_rows(length, members, rank) + first))
            first += length
        for holder, lengths in sorted(self.whole.items()):
            for length in lengths:
                if holder == rank:
                    local.append((-1, torch.arange(first, first + length)))
                first += length
        # The order of segments is not that of rings: pieces stand backwards, between whole documents.
        both = chain.from_iterable(zip_longest(local, pieces[::-1]))
        segments = [segment for segment in both if segment is not None]
        starts = list(accumulate((len(rows) for _, rows in segments), initial=0))
        found = {number: segment for segment, (number, _) in enumerate(segments) if number >= 0}
        rings = tuple(
            ring_of(*self.rings[number], rank, segment, starts[segment]) for number, segment in sorted(found.items())
        )
        layout = layout_of([len(rows) for _, rows in segments])
        return replace(layout, rings=rings), torch.cat([torch.arange(0), *(rows for _, rows in segments)])


def ring_of(length: int, members: tuple[int, ...], rank: int, segment: int, start: int) -> Ring:
    """The ring of a document as one member sees it."""
    chunks = chunk_sizes(length, len(members))
    return Ring(segment=segment, start=start, ranks=members, index=members.index(rank), chunks=chunks)


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


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a layer attends, whatever its documents."""

    exchange: str = "auto"
    causal: bool = True
    window: int | None = None
    scale: float = 0.3


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, backend: str, terms: Terms) -> Tensor:
    return varlen_attention(
        q,
        k,
        v,
        layout,
        causal=terms.causal,
        window=terms.window,
        scale=terms.scale,
        backend=backend,
        exchange=terms.exchange,
    )
