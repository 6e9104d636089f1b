"""A trainer was told another number of steps than came: its learning rate never reached the end, or ended early."""

from pathlib import Path
from typing import Any

import pytest
import torch

from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings
from tests.support import long_tail, make_set, settings_for


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), long_tail(500, 60), shard_tokens=4000)


def settings_of(data: Path, ranks: int, accumulation: int | None, **changes: Any) -> LoaderSettings:
    """accumulation: rows of each rank in a step; None: batching `tokens`, where it differs."""
    if accumulation is None:
        return settings_for(data, ranks=ranks, epochs=2, **changes)
    rows = {"batching": "rows", "tokens_per_step": None, "rows_per_step": ranks * accumulation, "window": 100}
    return settings_for(data, ranks=ranks, epochs=2, **rows | changes)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize(("accumulation", "tail"), [(1, "pad"), (4, "pad"), (4, "drop"), (None, None)])
def test_as_many_steps_come_as_were_announced_and_the_rate_ends_with_the_last(
    data: Path, ranks: int, accumulation: int | None, tail: Any
) -> None:
    for rank in {0, ranks - 1}:
        with Loader(settings_of(data, ranks, accumulation, tail=tail), rank=rank, mode="inline") as loader:
            announced = loader.steps
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=announced)
            rates, micro_batches = [], 0
            for batch in loader:
                micro_batches += 1
                if batch.last_in_step:
                    optimizer.step()
                    schedule.step()
                    rates += schedule.get_last_lr()
            assert len(rates) == announced == batch.step + 1
            assert rates[-1] == pytest.approx(0, abs=1e-12) and min(rates[:-1]) > 1e-4
            if accumulation is not None:
                assert micro_batches == len(loader) == announced * accumulation


def test_the_number_of_ranks_does_not_change_what_is_announced(data: Path) -> None:
    """A job of so many rows in each step may be resumed on any number of ranks that shares them."""
    announced = set()
    for ranks in (1, 3, 8):
        with Loader(settings_of(data, ranks, 24 // ranks), mode="inline") as loader:
            announced.add(loader.steps)
    assert len(announced) == 1


def test_a_resumed_job_is_announced_whole(data: Path) -> None:
    settings = settings_of(data, 1, 4)
    with Loader(settings, mode="inline") as loader:
        whole, batches = loader.steps, iter(loader)
        for _ in range(5 * 4):
            next(batches)
        state = loader.state_dict(step=5)
    with Loader(settings, mode="inline") as loader:
        loader.load_state_dict(state)
        assert loader.steps == whole
        assert sum(batch.last_in_step for batch in loader) == whole - 5
