import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.fitness import check_documents
from seqmesh.loader.settings import Blocks, LoaderSettings
from seqmesh.loader.sources import one_source
from seqmesh.loader.state import SourceState
from seqmesh.loader.stream import StreamState, draw
from tests.loader.reference import SHUFFLES, plain_order, some_parts

STATE = StreamState(seed=0).to_dict()
SOURCE_FIELDS = [f.name for f in fields(SourceState)]


def settings_of(**changes: Any) -> LoaderSettings:
    defaults: dict[str, Any] = {"data": "set", "tokens_per_step": 20, "capacity": 10, "epochs": 1, "overlong": "split"}
    return LoaderSettings(**defaults | changes)


def expected_steps(lengths: list[int], settings: LoaderSettings, seed: int) -> list[list[tuple[int, int, int]]]:
    """The plain meaning of the settings: list all pieces of an epoch in order, then cut them into steps greedily."""
    steps: list[list[tuple[int, int, int]]] = []
    assert settings.tokens_per_step is not None
    for epoch in range(settings.epochs or 1):
        parts = some_parts(len(lengths)).tolist()
        order = plain_order(range(len(lengths)), parts, settings.shuffle, seed, epoch)
        pieces: list[tuple[int, int, int]] = []
        for document in order:
            length, most = lengths[document], settings.longest
            if length <= most:
                pieces.append((document, 0, length))
            elif settings.overlong == "truncate":
                pieces.append((document, 0, most))
            elif settings.overlong == "split":
                pieces += [(document, at, min(most, length - at)) for at in range(0, length, most)]
        open_step: list[tuple[int, int, int]] = []
        for piece in pieces:
            if sum(p[2] for p in open_step) + piece[2] > settings.tokens_per_step:
                steps.append(open_step)
                open_step = []
            open_step.append(piece)
        if open_step:
            steps.append(open_step)
    return steps


def walked_steps(
    state: StreamState, lengths: list[int], settings: LoaderSettings
) -> tuple[list[list[tuple[int, int, int]]], list[StreamState]]:
    steps, states = [], [state]
    array, sources = np.array(lengths, np.int64), one_source(len(lengths), some_parts(len(lengths)))
    while (drawn := draw(state, array, settings, sources)) is not None:
        taken, state = drawn
        rows = np.stack([taken.document, taken.offset, taken.length], axis=1).tolist()
        steps.append([(a, b, c) for a, b, c in rows])
        states.append(state)
    return steps, states


cases = st.tuples(
    st.lists(st.integers(1, 35), min_size=1, max_size=40),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(SHUFFLES),
    st.integers(1, 3),
    st.integers(0, 2**40),
    st.integers(1, 10),
)


@given(cases)
def test_steps_are_those_of_the_plain_meaning(case: tuple[list[int], Any, bool | Blocks, int, int, int]) -> None:
    lengths, overlong, shuffle, epochs, seed, longest = case
    settings = settings_of(overlong=overlong, shuffle=shuffle, epochs=epochs, max_document=longest)
    steps, states = walked_steps(StreamState(seed=seed), lengths, settings)
    assert steps == expected_steps(lengths, settings, seed)
    served = sum(piece[2] for step in steps for piece in step)
    assert states[-1].tokens == served
    if overlong == "truncate":
        assert served + states[-1].truncated == epochs * sum(lengths)
    if overlong == "split":
        assert served == epochs * sum(lengths)
    if overlong == "drop" and steps:
        assert draw(states[-1], np.array(lengths, np.int64), settings) is None


@given(cases)
def test_restoring_any_state_gives_the_same_tail(case: tuple[list[int], Any, bool | Blocks, int, int, int]) -> None:
    lengths, overlong, shuffle, epochs, seed, longest = case
    settings = settings_of(overlong=overlong, shuffle=shuffle, epochs=epochs, max_document=longest)
    steps, states = walked_steps(StreamState(seed=seed), lengths, settings)
    for number, state in enumerate(states):
        restored = StreamState.from_dict(json.loads(json.dumps(state.to_dict())))
        assert walked_steps(restored, lengths, settings)[0] == steps[number:]
        assert restored.step == number


def test_dropped_documents_are_counted() -> None:
    _, states = walked_steps(StreamState(seed=1), [5, 11, 30, 10], settings_of(overlong="drop"))
    assert states[-1].dropped == 2 or states[-1].epoch == 0  # trailing ones are passed by the last look
    taken = draw(StreamState(seed=1), np.array([11, 5], np.int64), settings_of(overlong="drop", shuffle=False))
    assert taken is not None
    assert taken[1].dropped == 1


def test_epochs_differ_and_no_document_is_twice_in_a_step() -> None:
    steps, _ = walked_steps(StreamState(seed=3), [5] * 30, settings_of(epochs=2))
    halves = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    orders = [[piece[0] for step in half for piece in step] for half in halves]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1]
    assert all(len({p[0] for p in step}) == len(step) for step in steps)


def test_the_order_does_not_depend_on_the_mesh() -> None:
    lengths = [1, 9, 4, 7] * 10
    wide = walked_steps(StreamState(seed=0), lengths, settings_of(max_document=9, capacity=10))[0]
    for ranks, capacity in ((4, 9), (7, 50)):
        settings = settings_of(max_document=9, ranks=ranks, capacity=capacity)
        assert walked_steps(StreamState(seed=0), lengths, settings)[0] == wide


@pytest.mark.parametrize(
    ("lengths", "changes", "message"),
    [
        ([], {}, "holds no tokens"),
        ([0, 0], {}, "holds no tokens"),
        ([5, 11, 12], {"overlong": "error"}, r"document 1 has 11 tokens, max_document is 10 \(2 documents are over\)"),
        ([11, 12], {"overlong": "drop"}, "every document is over max_document, 10"),
    ],
)
def test_data_that_can_not_be_served_is_refused(lengths: list[int], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_documents(np.array(lengths, np.int64), settings_of(**changes))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "must be a mapping, not a list"),
        ({}, "has version None: this seqmesh reads 2"),
        ({"version": 2}, "not a stream state: needs"),
        (STATE | {"seed": True}, r"\['seed'\] must be integers from 0"),
        (STATE | {"step": 1 << 62}, r"\['step'\] must be integers from 0"),
        (STATE | {"position": [-1]}, "position must be a list of integers from 0"),
        (STATE | {"position": [1.5]}, "position must be a list of integers"),
        (STATE | {"position": 0}, "position must be a list of integers"),
        (STATE | {"position": [0, 0]}, "must have the same number of each"),
        (STATE | {name: [] for name in SOURCE_FIELDS}, "must have the same number of each"),
        (STATE | dict.fromkeys(SOURCE_FIELDS, [0] * 300), "must have the same number of each"),
        (STATE | {"window_step": 1}, "window_step is 1, step only 0"),
        (STATE | {"waiting": [1]}, "1 integers say what waits"),
        (STATE | {"extra": 1}, r"has besides, \['extra'\]"),
        (STATE | {"version": 7}, "has version 7: this seqmesh reads 2"),
    ],
)
def test_a_state_that_is_not_ours_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamState.from_dict(state)


def test_a_state_outside_the_data_is_refused() -> None:
    state = StreamState(seed=0, sources=(SourceState(position=4),))
    with pytest.raises(ValueError, match=r"position 4 \(offset 0\) is outside the 3 documents"):
        draw(state, np.array([1, 2, 3], np.int64), settings_of())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"tokens_per_step": 10**20}, "tokens_per_step is 100000000000000000000: must be at least 1, and at most"),
        ({"ranks": -1}, "ranks is -1"),
        ({"overlong": "ignore"}, "overlong is 'ignore'"),
        ({"seed": -1}, "seed is -1"),
        ({"max_document": 30}, "max_document is 30: must not be over tokens_per_step, 20"),
        ({"mode": "fast"}, "mode is 'fast': must be one of free, waves"),
        ({"mode": "waves", "stages": 2}, "stages is 2: needs mode 'free', 'waves' is chosen"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(**changes)


def test_a_mesh_that_can_not_hold_the_longest_document_is_refused() -> None:
    settings_of(max_document=20, ranks=2).check_mesh()
    with pytest.raises(ValueError, match="max_document is 20: 1 ranks of 10 tokens hold 10; use more ranks"):
        settings_of(max_document=20).check_mesh()
    with pytest.raises(ValueError, match="max_document is 20: 2 ranks of 9 tokens hold 16"):
        settings_of(max_document=20, ranks=2, capacity=9).check_mesh()


def test_settings_travel_as_json(tmp_path: Path) -> None:
    settings = settings_of(data=str(tmp_path), seed=5)
    assert LoaderSettings.from_json(settings.to_json()) == settings
