import itertools
import math
from typing import get_args

import pytest
import torch
from torch import nn

from seqmesh.trainer.optim import OptimConfig, learning_rate, make_optimizer, set_rate
from seqmesh.trainer.optim.config import Name, Schedule
from seqmesh.trainer.optim.norms import BLOCK, square_sum, square_sums


def rates_of(steps: int = 20, **changes: object) -> list[float]:
    config = OptimConfig(lr=1.0, warmup=4, final=0.1, **changes)  # type: ignore[arg-type]  # any of its fields
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_warms_up_falls_and_ends_where_it_should(schedule: Schedule) -> None:
    rates = rates_of(schedule=schedule)
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(OptimConfig(lr=1.0, schedule=schedule), 99, 20) == pytest.approx(0.1)
    assert learning_rate(OptimConfig(lr=1.0, schedule=schedule), 0, 1) == 1.0


def test_schedules_fall_as_they_are_called() -> None:
    assert rates_of(schedule="constant")[3:] == [1.0] * 17
    linear = rates_of(schedule="linear")[4:]
    assert [a - b for a, b in itertools.pairwise(linear)] == pytest.approx([0.9 / 15] * 15)
    cosine = rates_of(steps=21)  # half-way from step 4 to step 20
    assert cosine[12] == pytest.approx(0.55)
    stable = rates_of(schedule="wsd", decay=0.2)  # the last four of twenty
    assert stable[3:16] == [1.0] * 13
    assert stable[16:] == pytest.approx([0.775, 0.55, 0.325, 0.1])
    assert rates_of(schedule="wsd", decay=1.0) == rates_of(schedule="linear")


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=True), nn.LayerNorm(3))
    for name in get_args(Name):
        optimizer = make_optimizer(model.parameters(), OptimConfig(name=name, weight_decay=0.3))
        assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(1, 0.3), (3, 0.0)]
        set_rate(optimizer, 0.5)
        assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"final": 2.0}, "final is 2.0"),
        ({"decay": -0.1}, "decay is -0.1"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"clip": 0.0}, "clip is 0.0"),
    ],
)
def test_unfit_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**changes)  # type: ignore[arg-type]  # wrong on purpose


def test_norms_of_many_numbers_are_exact_enough() -> None:
    """Added up in float32 one after the other, they are not."""
    numbers = torch.randn(40 * BLOCK + 3, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1e-3
    exact = float(numbers.double().square().sum())
    assert float(square_sum([numbers.view(-1, 1)])) == pytest.approx(exact, rel=1e-5)
    parts = [numbers[: BLOCK + 1], numbers[BLOCK + 1 : 5], numbers[7:9]]
    found = square_sums(parts, [2, 0, 2], 4)
    expected = float(parts[0].double().square().sum() + parts[2].double().square().sum())
    assert found.tolist() == pytest.approx([0.0, 0.0, expected, 0.0], rel=1e-5)
    assert float(square_sum([])) == 0.0
