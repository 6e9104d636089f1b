"""A pack of documents is split over a ring document by document, without padding, and every token keeps its place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.rotary import apply_rotary, rotary_tables
from seqmesh.packer.pieces import chunk_sizes, piece_ranges
from seqmesh.trainer.parallel import Ranks
from tests.kernels.reference import layout_of, positions_of, relative_error
from tests.kernels.spread import Wave, held_rows
from tests.ranks import run_ranks

MEMBERS = (0, 1)
HEADS, KV_HEADS, WIDTH = 4, 2, 8

Share = tuple[list[int], list[npt.NDArray[np.floating]]]  # rows of the whole pack, and arrays of those rows


def rows_of(bounds: list[int], rank: int) -> list[int]:
    """Rows of the whole pack that a rank of the ring holds."""
    return [start + row for start, stop in pairwise(bounds) for row in held_rows(stop - start, MEMBERS, rank).tolist()]


@pytest.mark.parametrize(
    ("bounds", "rank", "rows"),
    [
        ([0, 8, 16], 0, [0, 1, 6, 7, 8, 9, 14, 15]),
        ([0, 8, 16], 1, [2, 3, 4, 5, 10, 11, 12, 13]),
        ([0, 12, 16], 0, [0, 1, 2, 9, 10, 11, 12, 15]),
        ([0, 12, 16], 1, [3, 4, 5, 6, 7, 8, 13, 14]),
        ([0, 4, 8], 0, [0, 3, 4, 7]),
        ([0, 7], 0, [0, 5, 6]),
        ([0, 7], 1, [1, 2, 3, 4]),
    ],
)
def test_each_document_is_split_on_its_own(bounds: list[int], rank: int, rows: list[int]) -> None:
    assert rows_of(bounds, rank) == rows


def test_positions_stay_those_inside_the_document() -> None:
    assert positions_of([4, 4])[rows_of([0, 4, 8], 0)].tolist() == [0, 3, 0, 3]


def test_seven_tokens_on_two_ranks_have_no_padding() -> None:
    assert [piece_ranges(7, 2, index) for index in (0, 1)] == [((0, 1), (5, 7)), ((1, 3), (3, 5))]
    assert chunk_sizes(7, 2) == (1, 2, 2, 2)


def inputs(rows: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(rows, count, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for count in heads]


def rotated(qkv: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    tables = rotary_tables(positions, WIDTH, 100.0, q.dtype)
    return apply_rotary(q, *tables), apply_rotary(k, *tables), v


def attend_on_rank(ranks: Ranks, cases: list[tuple[list[int], torch.dtype]], reuse_positions: bool) -> list[Share]:
    """Of each case the rows that this rank holds, and their output with the gradients of q, k and v."""
    results = []
    for lengths, dtype in cases:
        layout, rows = Wave(rings=[(length, MEMBERS) for length in lengths]).on(ranks.rank)
        positions = torch.arange(len(rows)) if reuse_positions else positions_of(lengths)[rows]
        qkv = [x[rows].requires_grad_() for x in inputs(sum(lengths), dtype)]
        out = varlen_attention(*rotated(qkv, positions), layout)
        gradients = torch.autograd.grad(out.square().sum(), qkv)
        results.append((rows.tolist(), [x.detach().numpy() for x in (out, *gradients)]))
    return results


def gathered(results: list[Share]) -> list[Tensor]:
    """The ranks' rows in the order of the whole pack."""
    rows = torch.tensor([row for rows, _ in results for row in rows])
    assert rows.sort().values.tolist() == list(range(len(rows)))  # every token once: none lost, none padded
    order = rows.argsort()
    return [torch.from_numpy(np.concatenate(parts))[order] for parts in zip(*(x for _, x in results), strict=True)]


def undivided(lengths: list[int]) -> list[Tensor]:
    qkv = [x.requires_grad_() for x in inputs(sum(lengths), torch.float64)]
    out = varlen_attention(*rotated(qkv, positions_of(lengths)), layout_of(lengths))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), qkv)]


@pytest.mark.parametrize("reuse_positions", [False, True])
def test_gathered_output_is_the_undivided_one(reuse_positions: bool) -> None:
    packs: list[list[int]] = [[7], [8, 8], [12, 4], [7, 1, 13, 3]]
    cases = [(lengths, dtype) for lengths in packs for dtype in (torch.float64, torch.float32)]
    on_ranks = run_ranks(attend_on_rank, len(MEMBERS), cases, reuse_positions)
    for (lengths, dtype), results in zip(cases, zip(*on_ranks, strict=True), strict=True):
        errors = [relative_error(x, y) for x, y in zip(gathered(list(results)), undivided(lengths), strict=True)]
        if reuse_positions:  # what would happen with each rank's rows counted from 0
            assert errors[0] > 1e-2
        else:
            assert max(errors) <= (1e-12 if dtype == torch.float64 else 1e-6), lengths
