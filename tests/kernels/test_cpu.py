"""The block pair: blocks that saw only part of a row's keys merge to the undivided attention, with exact gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.cpu import UPCAST_ROWS, block_backward, block_forward
from tests.kernels.reference import leaves, reference_attention, relative_error

SCALE = 0.4


def random_blocks(rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((rows, 4, 8), (rows, 2, 8), (rows, 2, 8), (rows, 4, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Parts (out, lse) of the same rows over different keys -> what one block over all keys gives."""
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), dim=0)
    out = torch.stack([out * (part_lse - lse).exp().unsqueeze(-1) for out, part_lse in parts]).sum(dim=0)
    return out, lse


@pytest.mark.parametrize("cuts", [[0, 1, 3, 5, 7], [0, 7], [0, 3, 3, 7], [0, 200, 300]], ids=str)
def test_blocks_merge_to_the_undivided_attention(cuts: list[int]) -> None:
    q, k, v, dout = random_blocks(cuts[-1])
    exact = leaves(q, k, v)
    expected = reference_attention(exact, [cuts[-1]], causal=True, scale=SCALE)
    expected_gradients = torch.autograd.grad(expected, exact, dout)

    pieces = [slice(start, stop) for start, stop in pairwise(cuts)]
    out, gradients = torch.zeros_like(q), [torch.zeros_like(x) for x in (q, k, v)]
    for i, mine in enumerate(pieces):
        blocks = [(theirs, j == i) for j, theirs in enumerate(pieces[: i + 1])]
        parts = [block_forward(q[mine], k[keys], v[keys], causal=causal, scale=SCALE) for keys, causal in blocks]
        out[mine], lse = merge(parts)
        for keys, causal in blocks:
            dq, dk, dv = block_backward(
                dout[mine], q[mine], k[keys], v[keys], out[mine], lse, causal=causal, scale=SCALE
            )
            for total, rows, part in zip(gradients, (mine, keys, keys), (dq, dk, dv), strict=True):
                total[rows] += part

    assert relative_error(out, expected) <= 1e-12
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert relative_error(got, want) <= 1e-12


def test_lse_is_the_log_of_the_summed_exponentials() -> None:
    q, k, v, _ = random_blocks(5)
    _, lse = block_forward(q, k, v, causal=False, scale=SCALE)
    expected = torch.stack([(q[:, h] @ k[:, h // 2].T * SCALE).exp().sum(dim=1).log() for h in range(4)], dim=1)
    assert relative_error(lse, expected) <= 1e-12


def test_empty_blocks_are_neutral_and_harmless() -> None:
    q, k, v, dout = random_blocks(5)
    out, lse = block_forward(q, k[:0], v[:0], causal=False, scale=SCALE)
    assert out.shape == q.shape
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    dq, dk, dv = block_backward(dout, q, k[:0], v[:0], out, lse, causal=False, scale=SCALE)
    assert not dq.any()
    assert dk.shape == dv.shape == (0, 2, 8)
    none, _ = block_forward(q[:0], k, v, causal=False, scale=SCALE)
    assert none.shape == (0, 4, 8)


def test_blocks_the_native_operator_gets_wrong_are_refused() -> None:
    q, k, v, _ = random_blocks(5)
    with pytest.raises(ValueError, match="5 queries and 4 keys: must be square"):
        block_forward(q, k[:4], v[:4], causal=True, scale=SCALE)
    with pytest.raises(ValueError, match="q has 2 heads and k has 4"):  # the operator would end the process
        block_forward(k, q, q, causal=True, scale=SCALE)


@pytest.mark.parametrize("rows", [UPCAST_ROWS, UPCAST_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_keeps_its_dtype_and_wide_statistics(rows: int, dtype: torch.dtype) -> None:
    q, k, v, dout = random_blocks(rows, dtype)
    out, lse = block_forward(q, k, v, causal=True, scale=SCALE)
    gradients = block_backward(dout, q, k, v, out, lse, causal=True, scale=SCALE)
    assert lse.dtype == torch.float32
    assert {x.dtype for x in (out, *gradients)} == {dtype}
    exact = leaves(q, k, v)
    expected = reference_attention(exact, [rows], causal=True, scale=SCALE)
    assert relative_error(out, expected) <= 2e-2
    for got, want in zip(gradients, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert relative_error(got, want) <= 2e-2


@pytest.mark.parametrize(("rows", "in_float32"), [(UPCAST_ROWS, True), (UPCAST_ROWS + 1, False)])
def test_only_short_low_precision_blocks_are_computed_in_float32(rows: int, in_float32: bool) -> None:
    q, k, v, _ = random_blocks(rows, torch.bfloat16)
    out, _ = block_forward(q, k, v, causal=True, scale=SCALE)
    wide, _ = block_forward(q.float(), k.float(), v.float(), causal=True, scale=SCALE)
    assert torch.equal(out, wide.bfloat16()) is in_float32
