"""Rotary embedding: relative, exact at large positions, and ruled by the positions that came with the batch."""

from __future__ import annotations

import math

import pytest
import torch

from seqmesh.kernels.rotary import apply_rotary, rotary_tables


def test_tables_equal_plain_arithmetic() -> None:
    positions, head_dim, base = [0, 1, 5, 0, 3], 6, 100.0
    cos, sin = rotary_tables(torch.tensor(positions, dtype=torch.int32), head_dim, base, torch.float64)
    for row, position in enumerate(positions):
        for i in range(head_dim // 2):
            angle = position * base ** (-2 * i / head_dim)
            assert float(cos[row, i]) == pytest.approx(math.cos(angle), abs=1e-15)
            assert float(sin[row, i]) == pytest.approx(math.sin(angle), abs=1e-15)


@pytest.mark.parametrize("position", [1_000_003, 2**24 + 1])  # the second is not a float32
def test_angles_stay_exact_far_out(position: int) -> None:
    head_dim = 128
    cos, _ = rotary_tables(torch.tensor([position]), head_dim, 10_000.0, torch.float32)
    for i in range(head_dim // 2):
        assert float(cos[0, i]) == pytest.approx(math.cos(position * 10_000.0 ** (-2 * i / head_dim)), abs=1e-6)


def test_rows_turn_as_complex_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    cos, sin = rotary_tables(torch.tensor([0, 1, 2, 700]), 8, 10_000.0, torch.float64)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(apply_rotary(x, cos, sin), expected, rtol=0, atol=1e-14)


def test_a_million_positions_turn_as_complex_numbers() -> None:
    """float32 rows and tables up to position 2²⁰, against float64 numbers to the power of the position. Tables in
    float32 arithmetic would be off by 0.04 there."""
    generator = torch.Generator().manual_seed(4)
    positions = torch.cat((torch.arange(0, 1 << 20, 4_999), torch.tensor([(1 << 20) - 1])))
    x = torch.randn(len(positions), 2, 64, generator=generator)
    turned = apply_rotary(x, *rotary_tables(positions.int(), 64, 10_000.0, torch.float32))
    frequencies = 10_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    spins = torch.polar(
        torch.ones(len(positions), 32, dtype=torch.float64), torch.outer(positions.double(), frequencies)
    )
    exact = torch.complex(x[..., :32].double(), x[..., 32:].double()) * spins.unsqueeze(1)
    torch.testing.assert_close(turned.double(), torch.cat((exact.real, exact.imag), dim=-1), rtol=0, atol=1e-6)


def test_rows_that_are_given_stay_as_they_are() -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(5))
    before = x.clone()
    assert apply_rotary(x, *rotary_tables(torch.arange(3), 8, 100.0, torch.float32)).data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


def test_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 16, generator=generator, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        tables = [rotary_tables(torch.tensor([p]), 16, 10_000.0, torch.float64) for p in (query_position, key_position)]
        return float((apply_rotary(q, *tables[0]) * apply_rotary(k, *tables[1])).sum())

    assert score(9, 4) == pytest.approx(score(100_009, 100_004), abs=1e-9)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_low_precision_rows_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 2, 8, generator=generator).bfloat16()
    cos, sin = rotary_tables(torch.arange(5) * 1000, 8, 10_000.0, torch.float32)
    turned = apply_rotary(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rotary(x.float(), cos, sin).bfloat16())


def test_gradcheck() -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    cos, sin = rotary_tables(torch.arange(3), 4, 100.0, torch.float64)
    assert torch.autograd.gradcheck(lambda rows: apply_rotary(rows, cos, sin), x)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim is 7: must be even"):
        rotary_tables(torch.arange(3), 7, 10_000.0, torch.float32)
    with pytest.raises(ValueError, match="base is 0"):
        rotary_tables(torch.arange(3), 8, 0.0, torch.float32)
    with pytest.raises(ValueError, match="must be integers"):
        rotary_tables(torch.ones(3), 8, 10_000.0, torch.float32)
