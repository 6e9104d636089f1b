"""The contract of every stage that has a state, under every kind of settings: restored from any of its states, in a
fresh object, it goes on with the identical tail; at a step's end on any number of ranks."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed
from seqmesh.loader.mixture import Mixture, SourceOptions, WeightChange
from seqmesh.loader.planner import next_step
from seqmesh.loader.rows import plan_window, window_start
from seqmesh.loader.settings import Blocks, Delay, LoaderSettings
from seqmesh.loader.stream import Draw, StreamState, draw
from tests.support import every_label, global_batches, long_tail, make_set, settings_for

Walk = Iterator[tuple[Any, Any]]  # what comes, and the state after it


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ["code" if n % 3 == 0 else "web" for n in range(40)]
    return make_set(tmp_path_factory.mktemp("set"), long_tail(40, 40), sources=names)


MIXTURE = Mixture(
    sources={"web": SourceOptions(weight=0.7, epochs=2), "code": SourceOptions(weight=0.3, overlong="split")},
    changes=(WeightChange(step=2, weights={"web": 1, "code": 1}), WeightChange(step=5, weights={"web": 3, "code": 0})),
)
ROWS = {"batching": "rows", "tokens_per_step": None, "rows_per_step": 6, "capacity": 40, "window": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "tokens": {"epochs": 2},
    "in order": {"shuffle": False},
    "by blocks": {"shuffle": Blocks(window=2), "epochs": 2},
    "split": {"overlong": "split", "max_document": 9},
    "drop": {"overlong": "drop", "max_document": 12, "epochs": 2},
    "delay": {"max_document": 40, "delay": Delay(thresholds=(20, 30), release=2), "epochs": 2},
    "mixture": {"mixture": MIXTURE, "max_document": 40},
    "mixture, stop": {"mixture": replace(MIXTURE, exhausted="stop"), "max_document": 40, "shuffle": Blocks(window=1)},
    "rows": {**ROWS, "epochs": 2},
    "rows, drop": {**ROWS, "tail": "drop", "overlong": "split", "capacity": 16, "window": 19, "epochs": 2},
    "rows, mixture": {**ROWS, "mixture": MIXTURE, "window": 16},
}


@pytest.fixture(params=SETTINGS)
def settings(data: Path, request: pytest.FixtureRequest) -> LoaderSettings:
    return settings_for(data, **{"ranks": 2, "capacity": 40} | SETTINGS[request.param])


def rows_of(documents: Draw) -> list[list[int]]:
    columns = (documents.document, documents.offset, documents.length, documents.source)
    return [column.tolist() for column in columns]


def stream(settings: LoaderSettings, state: Any) -> Walk:
    """Global batches, or windows."""
    feed = Feed(settings)  # for its data alone
    lengths, sources = feed.shards.lengths, feed.sources
    at = feed.start if state is None else StreamState.from_dict(state)
    while True:
        if settings.batching == "tokens":
            drawn = draw(at, lengths, settings, sources)
            if drawn is None:
                return
            documents, at = drawn
        else:
            begun = window_start(at, settings, sources)
            window = None if begun is None else plan_window(begun, lengths, settings, sources)
            if window is None:
                return
            documents, at = window.documents, window.state(window.rows.steps)
        yield rows_of(documents), at.to_dict()


def planned(settings: LoaderSettings, state: Any) -> Walk:
    feed = Feed(settings)
    at = feed.start if state is None else StreamState.from_dict(state)
    while (step := next_step(at, feed.shards.lengths, every_label, settings, feed.sources)) is not None:
        at = step.after
        yield (step.digest, rows_of(step.documents)), at.to_dict()


def fed(settings: LoaderSettings, state: Any) -> Walk:
    feed = Feed(settings)
    at = feed.start if state is None else StreamState.from_dict(state)
    while (step := feed.step(at)) is not None:
        at = step.after
        yield (step.digest, rows_of(step.documents)), at.to_dict()


def loaded(rank: int) -> Callable[[LoaderSettings, Any], Walk]:
    def walk(settings: LoaderSettings, state: Any) -> Walk:
        with Loader(settings, rank=rank, mode="inline") as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                yield (batch_digest(batch), batch.epoch, batch.plan, batch.next_plan), loader.state_dict()

    return walk


STAGES = {"stream": stream, "planner": planned, "feed": fed, "rank 0": loaded(0), "rank 1": loaded(1)}


@pytest.mark.parametrize("stage", STAGES)
def test_any_state_gives_the_identical_tail(settings: LoaderSettings, stage: str) -> None:
    walk = STAGES[stage]
    items, states = zip(*walk(settings, None), strict=True)
    assert len(items) > 3
    for number, state in enumerate(states):
        assert [item for item, _ in walk(settings, json.loads(json.dumps(state)))] == list(items[number + 1 :])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_state_from_a_steps_end_goes_on_with_the_same_global_batches_on_any_ranks(
    settings: LoaderSettings, ranks: int
) -> None:
    every_step, others = global_batches(Feed(settings)), replace(settings, ranks=ranks)
    with Loader(settings, rank=0, mode="inline") as loader:
        ends = [loader.state_dict()] + [loader.state_dict() for batch in loader if batch.last_in_step]
    assert len(ends) == len(every_step) + 1
    for number, state in enumerate(json.loads(json.dumps(ends))):
        other = Feed(others)
        assert global_batches(other, StreamState.from_dict(state["stream"])) == every_step[number:]
        with Loader(others, rank=0, mode="inline") as loader:
            loader.load_state_dict(state)
            assert next((batch.step for batch in loader), len(every_step)) == number


def test_some_states_are_inside_steps_epochs_windows_and_documents(data: Path) -> None:
    """What the contract is worth."""
    states: dict[str, list[dict[str, Any]]] = {}
    for name, changes in SETTINGS.items():
        with Loader(settings_for(data, **{"ranks": 2, "capacity": 40} | changes), rank=0, mode="inline") as loader:
            states[name] = [loader.state_dict() for _ in loader]
    streams = {name: [state["stream"] for state in found] for name, found in states.items()}
    assert all(any(state["wave"] > 0 for state in found) for found in states.values())
    assert any(any(state["offset"]) for state in streams["split"])
    assert any(state["waiting"] for state in streams["delay"])
    assert streams["drop"][-1]["dropped"] != [0]
    assert {tuple(epoch > 0 for epoch in state["epoch"]) for state in streams["mixture"]} > {(False, False)}
    assert len({tuple(state["share"]) for state in streams["mixture"]}) > 3
    assert all(any(state["window_step"] for state in streams[name]) for name in streams if name.startswith("rows"))
    assert streams["rows, drop"][-1]["dropped"] != [0]


def loader_states(settings: LoaderSettings) -> list[dict[str, Any]]:
    """Before each batch of rank 0 and after the last."""
    with Loader(settings, rank=0, mode="inline") as loader:
        return [loader.state_dict()] + [loader.state_dict() for _ in loader]


def test_a_state_from_inside_a_step_is_refused_on_another_mesh(data: Path) -> None:
    inside = next(state for state in loader_states(settings_for(data, max_document=40)) if state["wave"] == 1)
    with Loader(settings_for(data, max_document=40, capacity=41), rank=0, mode="inline") as loader:
        loader.load_state_dict(inside)
        with pytest.raises(LoaderError, match="taken inside step 0 under plan"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("before", "changes", "message"),
    [
        ({}, {"tokens_per_step": 256}, "tokens_per_step was 128, is 256"),
        ({}, {"shuffle": False}, "shuffle was True, is False"),
        ({}, {"shuffle": Blocks(window=3)}, "shuffle was True, is {'window': 3}"),
        ({"shuffle": Blocks(window=3)}, {"shuffle": Blocks()}, "shuffle was {'window': 3}, is {'window': 16}"),
        ({}, {"overlong": "drop"}, "overlong was error, is drop"),
        ({}, ROWS, "tokens_per_step was 128, is None; .*rows_per_step was None, is 6"),
        (ROWS, {**ROWS, "rows_per_step": 10}, "rows_per_step was 6, is 10"),
        (ROWS, {**ROWS, "window": 21}, "window was 20, is 21"),
        (ROWS, {**ROWS, "tail": "drop"}, "tail was pad, is drop"),
        (ROWS, {**ROWS, "capacity": 41, "max_document": 40}, "capacity was 40, is 41"),
    ],
)
def test_a_state_of_another_order_is_refused_naming_what_differs(
    data: Path, before: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    state = loader_states(settings_for(data, **before))[0]
    with (
        Loader(settings_for(data, **changes), rank=0, mode="inline") as loader,
        pytest.raises(ValueError, match=message),
    ):
        loader.load_state_dict(state)


def test_a_state_of_other_data_is_refused(data: Path, tmp_path: Path) -> None:
    state = loader_states(settings_for(data))[0]
    other = make_set(tmp_path, long_tail(60, 40, seed=9))
    with Loader(settings_for(other), rank=0, mode="inline") as loader, pytest.raises(ValueError, match="data was"):
        loader.load_state_dict(state)
