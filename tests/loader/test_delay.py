"""Long documents come together, a little later; nothing else about the stream changes."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed
from seqmesh.loader.settings import Delay, LoaderSettings
from seqmesh.loader.sources import one_source
from seqmesh.loader.state import SourceState
from seqmesh.loader.stream import StreamState, draw
from tests.loader.reference import SHUFFLES, some_parts
from tests.support import global_batches, long_tail, make_set, settings_for

Piece = tuple[int, int, int]


def settings_of(**changes: Any) -> LoaderSettings:
    defaults: dict[str, Any] = {
        "data": "set",
        "seed": 0,
        "tokens_per_step": 60,
        "capacity": 10,
        "epochs": 1,
        "overlong": "split",
        "delay": Delay(thresholds=(8,), release=3),
    }
    return LoaderSettings(**defaults | changes)


def walked(
    state: StreamState, lengths: list[int], settings: LoaderSettings
) -> tuple[list[list[Piece]], list[StreamState]]:
    """The pieces of every step, and the state before each and after the last."""
    steps, states = [], [state]
    sources = one_source(len(lengths), some_parts(len(lengths)))
    while (drawn := draw(state, np.array(lengths, np.int64), settings, sources)) is not None:
        taken, state = drawn
        rows = np.stack([taken.document, taken.offset, taken.length], axis=1).tolist()
        steps.append([(a, b, c) for a, b, c in rows])
        states.append(state)
    return steps, states


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], LoaderSettings]:
    longest, levels = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    thresholds = sorted(draw(st.sets(st.integers(1, longest), min_size=1, max_size=levels)))
    release = draw(st.integers(1, 4))
    settings = settings_of(
        capacity=12,
        max_document=longest,
        overlong=draw(st.sampled_from(["split", "truncate", "drop"])),
        shuffle=draw(st.sampled_from(SHUFFLES)),
        epochs=draw(st.integers(1, 3)),
        tokens_per_step=release * longest + draw(st.integers(0, 40)),
        delay=Delay(thresholds=tuple(thresholds), release=release),
    )
    return draw(st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)), settings


def by_epoch(steps: list[list[Piece]], states: list[StreamState]) -> dict[int, Counter[Piece]]:
    served: dict[int, Counter[Piece]] = {}
    for step, before in zip(steps, states[:-1], strict=True):
        served.setdefault(before.epoch, Counter()).update(step)
    return served


@given(cases(), st.integers(0, 2**40))
def test_every_epoch_serves_what_it_does_without_delay(case: tuple[list[int], LoaderSettings], seed: int) -> None:
    lengths, settings = case
    assert settings.tokens_per_step is not None
    steps, states = walked(StreamState(seed=seed), lengths, settings)
    plain, plain_states = walked(StreamState(seed=seed), lengths, replace(settings, delay=None))
    assert by_epoch(steps, states) == by_epoch(plain, plain_states)
    assert all(len(step) > 0 and sum(piece[2] for piece in step) <= settings.tokens_per_step for step in steps)
    assert states[-1].waiting == ()
    for name in ("tokens", "truncated"):
        assert getattr(states[-1], name) == getattr(plain_states[-1], name)


@given(cases(), st.integers(0, 2**40))
def test_restoring_any_state_gives_the_same_tail(case: tuple[list[int], LoaderSettings], seed: int) -> None:
    lengths, settings = case
    assert settings.delay is not None
    most = len(settings.delay.thresholds) * (settings.delay.release - 1) + settings.delay.release
    steps, states = walked(StreamState(seed=seed), lengths, settings)
    for number, state in enumerate(states):
        restored = StreamState.from_dict(json.loads(json.dumps(state.to_dict())))
        assert restored == state
        assert walked(restored, lengths, settings)[0] == steps[number:]
        assert len(state.waiting) // 2 <= most


@given(cases(), st.integers(0, 2**40))
def test_long_documents_come_as_many_as_are_released(case: tuple[list[int], LoaderSettings], seed: int) -> None:
    """In every step but the last ones of the epoch, in which the queues are emptied."""
    lengths, settings = case
    assert settings.delay is not None
    thresholds, release = settings.delay.thresholds, settings.delay.release
    steps, states = walked(StreamState(seed=seed), lengths, replace(settings, epochs=1))
    for step, after in zip(steps, states[1:], strict=True):
        if after.sources[0].position < len(lengths) and after.epoch == 0:
            levels = Counter(np.searchsorted(thresholds, [piece[2] for piece in step], side="right").tolist())
            assert all(count % release == 0 for level, count in levels.items() if level > 0)


def test_a_queue_is_released_when_it_is_full() -> None:
    """Documents of 9 are long. The third one fills the queue; all three still fit into the first step."""
    settings = settings_of(shuffle=False, tokens_per_step=40)
    steps, states = walked(StreamState(seed=0), [9, 1, 9, 2, 9, 3, 4], settings)
    assert [[document for document, _, _ in step] for step in steps] == [[1, 3, 0, 2, 4, 5, 6]]
    assert states[-1].tokens == 37


def test_what_has_no_room_begins_the_next_step_and_what_is_left_ends_the_epoch() -> None:
    settings = settings_of(shuffle=False, tokens_per_step=30)
    steps, states = walked(StreamState(seed=0), [9, 2, 9, 2, 9, 3, 9, 6], settings)
    assert [[document for document, _, _ in step] for step in steps] == [[1, 3, 5, 7], [0, 2, 4], [6]]
    assert states[1].waiting == (0, 0, 2, 0, 4, 0, 6, 0)
    assert (states[1].sources[0].position, states[1].epoch) == (8, 0)
    assert states[2].waiting == (6, 0)


def test_a_step_ends_before_more_are_due_than_the_next_one_is_sure_to_hold() -> None:
    settings = settings_of(shuffle=False, tokens_per_step=30)
    steps, states = walked(StreamState(seed=0), [2, 3, 9, 9, 9, 9, 9, 1, 9, 1], settings)
    assert [[document for document, _, _ in step] for step in steps] == [[0, 1, 7], [2, 3, 4, 9], [5, 6, 8]]
    assert [state.sources[0].position for state in states] == [0, 8, 10, 0]


def step_of(lengths: list[int], settings: LoaderSettings) -> list[int]:
    """In which step each document comes."""
    steps, _ = walked(StreamState(seed=1), lengths, settings)
    found = {document: number for number, step in enumerate(steps) for document, _, _ in step}
    return [found[document] for document in range(len(lengths))]


def test_the_delay_is_short() -> None:
    """A twentieth of the documents is long. On average a token comes half a step later than it would, at most."""
    lengths = [100] * 50 + [10] * 950
    delay = Delay(thresholds=(100,), release=4)
    settings = settings_of(tokens_per_step=1600, capacity=100, max_document=100, delay=delay)
    late = np.subtract(step_of(lengths, settings), step_of(lengths, replace(settings, delay=None)))
    assert np.average(late, weights=lengths) < 0.5
    assert late.max() <= 4


@pytest.mark.parametrize(
    ("thresholds", "release", "message"),
    [
        ((), 2, r"thresholds are \[\]: must be at least 1, and ascend"),
        ((0,), 2, r"thresholds are \[0\]"),
        ((5, 5), 2, r"thresholds are \[5, 5\]"),
        ((5,), 0, "release is 0: must be at least 1, and at most 128"),
        ((5, 6), 86, "release is 86: must be at least 1, and at most 85"),
        ((11,), 2, "delay.thresholds end with 11: no document is over 10 tokens"),
        ((5,), 7, "delay.release is 7: so many documents of 10 tokens are over tokens_per_step, 60"),
    ],
)
def test_a_delay_that_does_not_fit_is_refused(thresholds: tuple[int, ...], release: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(delay=Delay(thresholds=thresholds, release=release))


@pytest.mark.parametrize(
    ("waiting", "delay", "message"),
    [
        ((0, 0), None, "1 documents wait in the state: delay must be as it was"),
        ((1, 0), Delay(thresholds=(8,), release=3), "not as delay"),
        ((0, 0) * 6, Delay(thresholds=(8,), release=3), "not as delay"),
        ((2, 0), Delay(thresholds=(8,), release=3), r"position 2 \(offset 0\) waits: it is not before 2"),
    ],
)
def test_a_state_that_these_settings_do_not_make_is_refused(
    waiting: tuple[int, ...], delay: Delay | None, message: str
) -> None:
    state = StreamState(seed=0, sources=(SourceState(position=2),), waiting=waiting)
    with pytest.raises(ValueError, match=message):
        draw(state, np.array([9, 1, 9], np.int64), settings_of(shuffle=False, delay=delay))


def test_half_a_place_is_no_state() -> None:
    with pytest.raises(ValueError, match="not a stream state"):
        StreamState.from_dict(StreamState(seed=0).to_dict() | {"waiting": [1]})


def test_settings_with_a_delay_travel_as_json(tmp_path: Path) -> None:
    settings = settings_of(data=str(tmp_path))
    assert LoaderSettings.from_json(settings.to_json()) == settings.resolved() == settings
    with pytest.raises(ValueError, match="releases"):
        LoaderSettings.from_json(settings.to_json().replace(b'"release"', b'"releases"'))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), long_tail(60, 40))


DELAY = Delay(thresholds=(20, 30), release=2)


def test_global_batches_do_not_depend_on_the_number_of_ranks(data: Path) -> None:
    one = global_batches(Feed(settings_for(data, max_document=40, delay=DELAY)))
    assert one != global_batches(Feed(settings_for(data, max_document=40)))
    assert all(one == global_batches(Feed(settings_for(data, max_document=40, ranks=n, delay=DELAY))) for n in (2, 5))


@pytest.mark.parametrize("mode", ["inline", "process"])
def test_a_loader_resumes_with_what_waits(data: Path, mode: Any) -> None:
    settings = settings_for(data, max_document=40, delay=DELAY)
    with Loader(settings, rank=0, mode="inline") as loader:
        steps, states = zip(*((batch.step, loader.state_dict()) for batch in loader), strict=True)
    number = next(n for n, state in enumerate(states) if state["stream"]["waiting"])
    with Loader(settings, rank=0, mode=mode) as loader:
        loader.load_state_dict(json.loads(json.dumps(states[number])))
        assert [batch.step for batch in loader] == list(steps[number + 1 :])
        assert loader.state_dict() == states[-1]


def test_a_state_of_another_delay_is_refused_and_one_from_before_there_was_any_is_not(data: Path) -> None:
    with Loader(settings_for(data), rank=0, mode="inline") as loader:
        before = loader.state_dict()
        assert before["order"].pop("delay") is None
        loader.load_state_dict(before)
    settings = settings_for(data, delay=DELAY)
    with Loader(settings, rank=0, mode="inline") as loader, pytest.raises(ValueError, match="delay was None, is"):
        loader.load_state_dict(before)
