"""LAMB against the paper's algorithm written down element by element, and against timm's where that is installed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from seqmesh.trainer.optim import OptimConfig, make_optimizer
from tests.trainer.slow_lamb import SlowLamb

SHAPES = st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3), min_size=1, max_size=5)
CONFIG = OptimConfig(name="lamb", betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1)
RATES = (0.1, 0.05, 0.2, 0.0)


def drawn(shapes: Sequence[Sequence[int]], seed: int, zeros: Sequence[bool]) -> list[Tensor]:
    """Normal numbers of very different sizes; all zeros where asked for."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [10.0 ** (3 * i % 7 - 3) * (not zero) for i, zero in zip(range(len(shapes)), zeros, strict=False)]
    numbers = [torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes]
    return [number * size for number, size in zip(numbers, sizes, strict=True)]


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, zeros=st.lists(st.booleans(), min_size=10, max_size=10), seed=st.integers(0, 99))
def test_steps_are_those_of_the_paper(shapes: list[list[int]], zeros: list[bool], seed: int) -> None:
    """Parameters and gradients that are zero among them."""
    parameters = [nn.Parameter(p) for p in drawn(shapes, seed, zeros)]
    slow = SlowLamb([p.detach().clone() for p in parameters], CONFIG)
    optimizer = make_optimizer(parameters, CONFIG)
    for turn, rate in enumerate(RATES):
        gradients = drawn(shapes, seed + turn + 1, zeros[turn:][::-1])
        step(optimizer, parameters, gradients, rate)
        slow.step(gradients, rate)
        for found, wanted in zip(parameters, slow.parameters, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-300)


def step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[Tensor], rate: float
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def test_what_begins_as_zeros_moves_and_what_has_no_step_stays() -> None:
    zeros, still, both = (nn.Parameter(torch.full((2, 2), value)) for value in (0.0, 3.0, 0.0))
    optimizer = make_optimizer([zeros, still, both], OptimConfig(name="lamb", weight_decay=0.0))
    gradients = [torch.full((2, 2), value) for value in (0.5, 0.0, 0.0)]
    step(optimizer, [zeros, still, both], gradients, 0.1)
    assert zeros.tolist() == [[pytest.approx(-0.1)] * 2] * 2  # Adam's first step: the sign, a trust ratio of 1
    assert still.tolist() == [[3.0] * 2] * 2
    assert both.tolist() == [[0.0] * 2] * 2


def timm_lamb(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """timm's, set to do what the paper says: no clipping inside, the trust ratio for all parameters."""
    try:
        from timm.optim import Lamb
    except (ImportError, RuntimeError) as error:  # the latter where its torchvision is for another torch
        pytest.skip(f"timm can not be imported: {error}")

    optimizer: torch.optim.Optimizer = Lamb(
        groups, betas=config.betas, eps=config.eps, max_grad_norm=None, always_adapt=True
    )
    return optimizer


def test_steps_are_those_of_timm() -> None:
    shapes = [[7, 5], [3], [2, 3, 4], [5]]
    start = drawn(shapes, 1, [False, False, True, False])
    ours, theirs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizer = make_optimizer(ours, CONFIG)
    groups = [
        {"params": [p for p in theirs if p.ndim > 1], "weight_decay": CONFIG.weight_decay},
        {"params": [p for p in theirs if p.ndim <= 1], "weight_decay": 0.0},
    ]
    other = timm_lamb(groups, CONFIG)
    for turn, rate in enumerate(RATES):
        gradients = drawn(shapes, turn + 2, [False] * 4)
        step(optimizer, ours, gradients, rate)
        step(other, theirs, gradients, rate)
        for found, wanted in zip(ours, theirs, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-11, atol=0)
