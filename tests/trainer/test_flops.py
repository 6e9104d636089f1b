"""FLOPs of a step, against the planner's own count, brute force, and torch's counter."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from seqmesh.packer.pieces import piece_ranges
from seqmesh.trainer.flops import find_peak, listed_peak, make_work
from seqmesh.trainer.job import count_work
from seqmesh.trainer.models.config import ModelConfig

CPU = torch.device("cpu")
WINDOWS = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4)


def slow_pairs(length: int, size: int, index: int, window: int | None) -> int:
    """Keys that every token of a piece sees, one by one."""
    own = [p for start, stop in piece_ranges(length, size, index) for p in range(start, stop)]
    return sum(min(p + 1, window or p + 1) for p in own)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4), st.integers(0, 3)), max_size=5), WINDOWS)
def test_pairs_are_counted_as_one_by_one(pieces: list[tuple[int, int, int]], windows: list[int | None]) -> None:
    pieces = [(length, size, index % size) for length, size, index in pieces]
    work = make_work(block_parameters=0, head_parameters=0, heads=1, head_dim=1, windows=windows)
    lengths, sizes, indices = np.array(pieces, np.int64).reshape(-1, 3).T
    expected = sum(slow_pairs(*piece, window) for piece in pieces for window in windows)
    assert work.layer_pairs(lengths, sizes, indices) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_a_models_work_is_what_the_planner_balances_by(tied: bool) -> None:
    config = ModelConfig(vocab_size=50, width=24, layers=3, heads=4, kv_heads=2, tied_embeddings=tied)
    work = count_work(config)
    assert work.per_token + work.per_supervised == config.shape.flops_per_token
    assert work.per_pair * config.layers == config.shape.flops_per_pair
    assert work.of_step(tokens=10, supervised=7, layer_pairs=5.0) == (
        work.per_token * 10 + work.per_supervised * 7 + work.per_pair * 5
    )


def test_six_flops_per_parameter_and_twelve_per_head_channel_and_pair_are_what_torch_counts() -> None:
    tokens, heads, head_dim, width = 7, 2, 4, 8
    x = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(width, width, requires_grad=True)
    q, k, v = (torch.randn(heads, tokens, head_dim, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as linear:
        torch.autograd.backward((x @ weight).sum())
    with FlopCounterMode(display=False) as attention:
        torch.autograd.backward(((q @ k.transpose(1, 2)) @ v).sum())
    work = make_work(block_parameters=width**2, head_parameters=0, heads=heads, head_dim=head_dim, windows=[None])
    assert linear.get_total_flops() == work.per_token * tokens
    assert attention.get_total_flops() == work.per_pair * tokens**2  # no mask: every pair


def test_the_peak_is_the_setting_or_the_data_sheets_or_measured() -> None:
    assert find_peak(CPU, torch.float32, 5e12).flops == 5e12
    measured = find_peak(CPU, torch.float32, None)
    assert 1e8 < measured.flops < 1e14
    assert "measured" in measured.source
    assert listed_peak("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert listed_peak("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert listed_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert listed_peak("a GPU of next year", torch.bfloat16) is None
