import math

import pytest
from torch import nn

from seqmesh.trainer.optim import OptimConfig, learning_rate, make_optimizer, set_rate


def test_the_rate_warms_up_falls_and_ends_where_it_should() -> None:
    config = OptimConfig(lr=1.0, warmup=4, final=0.1)
    rates = [learning_rate(config, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(config, 99, 20) == pytest.approx(0.1)
    assert learning_rate(OptimConfig(lr=1.0), 0, 1) == 1.0


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=True), nn.LayerNorm(3))
    groups = make_optimizer(model.parameters(), OptimConfig(weight_decay=0.3)).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.3), (3, 0.0)]
    optimizer = make_optimizer(model.parameters(), OptimConfig())
    set_rate(optimizer, 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"final": 2.0}, "final is 2.0"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ({"clip": 0.0}, "clip is 0.0"),
    ],
)
def test_unfit_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**changes)  # type: ignore[arg-type]  # wrong on purpose
