"""Rows beyond the last boundary: whatever they hold, they give 0 and spoil nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.loss import UNSUPERVISED, cross_entropy_sum
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from tests.kernels.reference import layout_of, positions_of

LENGTHS, REAL = [4, 3], 7
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def with_padding(rows: Tensor, padding: int, value: float) -> Tensor:
    return torch.cat((rows, rows.new_full((padding, *rows.shape[1:]), value)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [1, 64])
def test_nan_rows_past_the_end_give_zero_output_and_gradient(padding: int, dtype: torch.dtype) -> None:
    real = [random(REAL, heads, 8).to(dtype) for heads in (4, 2, 2, 4)]
    padded = [with_padding(rows, padding, math.nan) for rows in real]  # the output's gradient holds NaN there too

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = varlen_attention(q, k, v, layout_of(LENGTHS))
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    for got, expected in zip(run(*padded), run(*real), strict=True):
        assert torch.equal(got[:REAL], expected)
        assert torch.equal(got[REAL:], torch.zeros_like(got[REAL:]))


@pytest.mark.parametrize("padding", [1, 64])
def test_no_nan_reaches_the_gradient_of_a_weight(padding: int) -> None:
    def weight_gradients(padding: int) -> list[Tensor]:
        x = with_padding(random(REAL, 6), padding, 1.0)
        weights = [random(6, heads, 8).requires_grad_() for heads in (4, 2, 2)]
        projected = (torch.einsum("tw,whd->thd", x, weight) for weight in weights)
        beyond = torch.arange(len(x)).reshape(-1, 1, 1) >= REAL
        q, k, v = (rows.masked_fill(beyond, math.nan) for rows in projected)
        out = varlen_attention(q, k, v, layout_of(LENGTHS))
        return list(torch.autograd.grad(out.square().sum(), weights))

    for got, expected in zip(weight_gradients(padding), weight_gradients(0), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", [1, 64])
def test_padding_does_not_move_the_gradients_of_a_model(padding: int) -> None:
    config = ModelConfig(vocab_size=19, width=16, layers=2, heads=2, kv_heads=1, init_std=0.2)
    model = Transformer(config, seed=0).double()

    def gradients(padding: int) -> list[Tensor]:
        ids = torch.cat((torch.arange(REAL), torch.full((padding,), 18)))
        labels = torch.cat((torch.arange(REAL) + 1, torch.full((padding,), UNSUPERVISED)))
        logits = model(ids, positions_of(LENGTHS, padding), layout_of(LENGTHS))
        return list(torch.autograd.grad(cross_entropy_sum(logits, labels)[0], list(model.parameters())))

    for got, expected in zip(gradients(padding), gradients(0), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
