"""Restoring from every state gives the identical tail: batch by batch on the same ranks, step by step on any."""

from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import StreamState
from tests.support import global_batches, long_tail, make_set, settings_for


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), long_tail(60, 40))


def walk_loader(
    settings: LoaderSettings, rank: int, state: dict[str, Any] | None = None
) -> tuple[list[str], list[dict[str, Any]]]:
    """Digests of the batches, and the state before each and after the last."""
    with Loader(settings, rank=rank, mode="inline") as loader:
        if state:
            loader.load_state_dict(state)
        digests, states = [], [loader.state_dict()]
        for batch in loader:
            digests.append(batch_digest(batch))
            states.append(loader.state_dict())
    return digests, states


@pytest.mark.parametrize("changes", [{}, {"overlong": "split", "max_document": 9}, {"epochs": 2, "ranks": 1}])
def test_any_state_gives_the_identical_tail_on_the_same_mesh(data: Path, changes: dict[str, Any]) -> None:
    settings = settings_for(data, **{"ranks": 2, "capacity": 40} | changes)
    for rank in range(settings.ranks):
        digests, states = walk_loader(settings, rank)
        assert any(state["wave"] > 0 for state in states)
        for number, state in enumerate(states):
            assert walk_loader(settings, rank, state)[0] == digests[number:]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_state_from_a_steps_end_goes_on_with_the_same_global_batches_on_any_ranks(data: Path, ranks: int) -> None:
    settings = settings_for(data, ranks=2)
    every_step = global_batches(Feed(settings))
    _, states = walk_loader(settings, 0)
    at_ends = [state for state in states if state["wave"] == 0]
    assert len(at_ends) == len(every_step) + 1
    for number, state in enumerate(at_ends):
        other = Feed(settings_for(data, ranks=ranks))
        assert global_batches(other, StreamState.from_dict(state["stream"])) == every_step[number:]
        with Loader(other.settings, rank=0, mode="inline") as loader:
            loader.load_state_dict(state)
            assert next((batch.step for batch in loader), len(every_step)) == number


def test_a_state_from_inside_a_step_is_refused_on_another_mesh(data: Path) -> None:
    _, states = walk_loader(settings_for(data, max_document=40), 0)
    inside = next(state for state in states if state["wave"] == 1)
    with Loader(settings_for(data, max_document=40, capacity=41), rank=0, mode="inline") as loader:
        loader.load_state_dict(inside)
        with pytest.raises(LoaderError, match="taken inside step 0 under plan"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_step": 256}, "tokens_per_step was 128, is 256"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"overlong": "drop"}, "overlong was error, is drop"),
    ],
)
def test_a_state_of_another_order_is_refused_naming_what_differs(
    data: Path, changes: dict[str, Any], message: str
) -> None:
    _, states = walk_loader(settings_for(data), 0)
    with (
        Loader(settings_for(data, **changes), rank=0, mode="inline") as loader,
        pytest.raises(ValueError, match=message),
    ):
        loader.load_state_dict(states[0])


def test_a_state_of_other_data_is_refused(data: Path, tmp_path: Path) -> None:
    _, states = walk_loader(settings_for(data), 0)
    other = make_set(tmp_path, long_tail(60, 40, seed=9))
    with Loader(settings_for(other), rank=0, mode="inline") as loader, pytest.raises(ValueError, match="data was"):
        loader.load_state_dict(states[0])
