"""Faults that others' attention had, and that no other test here shows.

The rest of those known is where its subject is tested: rings in `rings/test_spread.py` (ring-flash-attention #42,
EasyContext #14 and #47, TransformerEngine #3331, transformers #39408, Megatron-LM #1465) and `rings/test_messages.py`
(pytorch #152938); the split of packs and their positions in P25 (TransformerEngine #1930, Megatron-LM #5243); rows past
the end in P23 (pytorch #186786); flash-attention #978, #1537, #2562 and #2611 in `backends/`; losses weighted after the
sum (Liger-Kernel #1298) in `losses/`, and averaged over parts (Megatron-LM #7513) in P27.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout
from seqmesh.packer.pieces import piece_pairs
from tests.kernels.reference import layout_of


def random_rows(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(rows, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 5], [5, 0], [2, 0, 0, 3]], ids=str)
def test_segments_without_rows_end_no_process(lengths: list[int]) -> None:
    """pytorch #141219: the native operator divides by their length."""
    without = [length for length in lengths if length]
    for got, expected in zip(results(lengths), results(without), strict=True):
        assert torch.equal(got, expected)


def results(lengths: list[int]) -> list[Tensor]:
    """Output, dq, dk, dv."""
    q, k, v = random_rows(sum(lengths))
    out = varlen_attention(q, k, v, layout_of(lengths))
    return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]


def test_bounds_that_are_written_anew_are_read_anew() -> None:
    """torchtitan #3776: a captured graph went on with the segments of the batch that it was captured with."""
    compiled = torch.compile(varlen_attention, backend="eager", fullgraph=True)
    q, k, v = random_rows(6)
    cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)
    layout = Layout(cu_seqlens, 4)
    compiled(q, k, v, layout)
    cu_seqlens.copy_(torch.tensor([0, 1, 5], dtype=torch.int32))
    assert torch.equal(compiled(q, k, v, layout), varlen_attention(q, k, v, layout_of([1, 4])))


@pytest.mark.parametrize("lengths", [[4096], [4000, 64, 32], [100_003, 17, 8_191]], ids=str)
def test_members_of_a_ring_share_every_document_alike(lengths: list[int]) -> None:
    """pytorch #189902: balanced over the pack as a whole, one member had the late half of its longest document."""
    for length in lengths:
        pairs = [piece_pairs(length, 8, member) for member in range(8)]
        assert sum(pairs) == length * (length + 1) // 2
        assert max(pairs) <= 1.01 * sum(pairs) / 8 + 2 * length  # a chunk is a token longer than another
