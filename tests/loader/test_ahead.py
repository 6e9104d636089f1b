"""What is said to be needed soon is what the stream comes to need, by a plain walk of it; and so much has room."""

from collections.abc import Iterator
from itertools import chain, pairwise, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader import ahead
from seqmesh.loader.ahead import IN_ORDER, WINDOWS, needed_at_once, upcoming
from seqmesh.loader.mixture import Mixture, SourceOptions
from seqmesh.loader.rows import plan_window, window_start
from seqmesh.loader.settings import Blocks, Delay, LoaderSettings
from seqmesh.loader.sources import Sources, one_source
from seqmesh.loader.stream import Draw, StreamState, begin, draw, start_state
from seqmesh.packer.lengths import Int64Array
from tests.loader.reference import SHUFFLES, plain_windows, some_parts

ROWS = {"batching": "rows", "tokens_per_step": None, "rows_per_step": 2, "window": 9}
MIXTURE = Mixture(sources={"a": SourceOptions(weight=3, epochs=2), "b": SourceOptions(weight=1)})
DELAY = Delay(thresholds=(7,), release=2)
KINDS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "dropping": {"overlong": "drop", "max_document": 7},
    "delay": {"delay": DELAY},
    "rows": ROWS,
    "mixture": {"mixture": MIXTURE},
    "rows, mixture": {**ROWS, "mixture": MIXTURE},
}
Case = tuple[LoaderSettings, Int64Array, Sources]


def settings_of(**changes: Any) -> LoaderSettings:
    defaults: dict[str, Any] = {"data": "set", "tokens_per_step": 40, "capacity": 10, "overlong": "split", "epochs": 2}
    return LoaderSettings(**defaults | changes)


def sources_of(codes: list[int], names: tuple[str, ...], part_first: Int64Array) -> Sources:
    """Documents of code s are those of source s, others are left out."""
    held = [np.flatnonzero(np.array(codes) == number) for number in range(len(names))]
    first = np.cumsum([0, *map(len, held)])
    return Sources(names=names, first=first, documents=np.concatenate(held), part_first=part_first)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    settings = settings_of(**KINDS[draw(st.sampled_from(sorted(KINDS)))], shuffle=draw(st.sampled_from(SHUFFLES)))
    lengths = draw(st.lists(st.integers(1, 15), min_size=12, max_size=60))
    names = ("a", "b") if settings.mixture else ("all",)
    codes = [0, 1, 9, *draw(st.lists(st.sampled_from([0, 0, 1, 9]), min_size=57, max_size=57))][: len(lengths)]
    parts = some_parts(len(lengths))
    whole = one_source(len(lengths), parts)
    sources = sources_of(codes, names, parts) if settings.mixture or draw(st.booleans()) else whole
    return settings, np.array(lengths), sources


def walked(case: Case, seed: int) -> Iterator[tuple[StreamState, Draw, StreamState]]:
    """Steps, or windows of batching `rows`: the state before, the documents, the state after."""
    settings, lengths, sources = case
    state = start_state(seed, len(sources))
    while True:
        if settings.batching == "tokens":
            drawn = draw(state, lengths, settings, sources)
        else:
            begun = window_start(state, settings, sources)
            window = None if begun is None else plan_window(begun, lengths, settings, sources)
            drawn = None if window is None else (window.documents, window.state(window.rows.steps))
        if drawn is None:
            return
        yield state, *drawn
        state = drawn[1]


def distinct(numbers: Iterator[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


def part_of(document: int, sources: Sources) -> int:
    bounds = sources.part_first.tolist()
    return next(number for number, (a, b) in enumerate(pairwise(bounds)) if a <= document < b)


def plain_ahead(after: StreamState, case: Case) -> list[int]:
    """Parts in turn for each source, by listing its documents of two epochs in windows."""
    settings, _, sources = case
    state = begin(after, settings, sources)
    lists = []
    for number, source in enumerate(state.sources if state else ()):
        last = (settings.mixture.sources[sources.names[number]].epochs if settings.mixture else None) or 2
        windows: list[list[int]] = []
        for epoch in range(source.epoch, min(source.epoch + 2, last)):
            of = sources.of(number).tolist()
            one = plain_windows(of, sources.part_first.tolist(), settings.shuffle, after.seed, epoch)
            if settings.shuffle is False:
                by_part = {part_of(document, sources): list[int]() for document in one[0]}
                for document in one[0]:
                    by_part[part_of(document, sources)].append(document)
                one = list(by_part.values())
            skipped = source.position if epoch == source.epoch else 0
            for window in one:
                windows.append(window[skipped:])
                skipped = max(skipped - len(window), 0)
        soon = [window for window in windows if window][: IN_ORDER if settings.shuffle is False else WINDOWS]
        lists.append(distinct(part_of(document, sources) for window in soon for document in window))
    return [number for row in zip_longest(*lists) for number in row if number is not None]


@given(cases(), st.integers(0, 2**40), st.integers(0, 2))
def test_parts_are_named_in_the_order_in_which_the_stream_needs_them(case: Case, seed: int, skipped: int) -> None:
    settings, lengths, sources = case
    exact = settings.batching == "tokens" and settings.overlong != "drop"
    steps = list(walked(case, seed))
    for before, documents, after in steps[skipped::3]:
        found = upcoming(before, lengths, settings, sources)
        now = distinct(part_of(document, sources) for document in documents.document.tolist())
        assert set(now) <= set(found) and len(set(found)) == len(found)
        if exact:
            assert found[: len(now)] == now
        if exact and not after.waiting:
            assert found == distinct(chain(now, plain_ahead(after, case)))
    assert upcoming(steps[-1][2], lengths, settings, sources) == []


@pytest.mark.parametrize("shuffle", [True, False, Blocks(window=4)])
def test_parts_are_all_there_when_only_a_few_documents_are_looked_up(
    shuffle: bool | Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(shuffle=shuffle)
    sources, lengths = one_source(60, np.arange(0, 61, 6)), np.full(60, 10)
    exact = [upcoming(state, lengths, settings, sources) for state, _, _ in walked((settings, lengths, sources), 3)]
    monkeypatch.setattr(ahead, "WALKED", 2)
    found = [upcoming(state, lengths, settings, sources) for state, _, _ in walked((settings, lengths, sources), 3)]
    for few, all_of_them in zip(found, exact, strict=True):
        assert set(few) >= set(all_of_them)
        assert few[:2] == all_of_them[:2]
    assert any(few != all_of_them for few, all_of_them in zip(found, exact, strict=True)) or shuffle is False


@st.composite
def large_parts(draw: st.DrawFn) -> tuple[Case, Int64Array]:
    """A step's documents are fewer than a part's."""
    shuffle = draw(st.sampled_from((True, False, Blocks(window=1), Blocks(window=3))))
    settings = settings_of(**KINDS[draw(st.sampled_from(["tokens", "rows", "delay", "mixture"]))], shuffle=shuffle)
    held = draw(st.lists(st.integers(10, 30), min_size=1, max_size=12))
    part_first = np.cumsum([0, *held])
    codes = [n % 2 for n in range(sum(held))] if settings.mixture else [0] * sum(held)
    sources = sources_of(codes, ("a", "b") if settings.mixture else ("all",), part_first)
    lengths = 8 + np.arange(sum(held)) % 3
    return (settings, lengths, sources), np.array(draw(st.lists(st.integers(1, 99), min_size=12, max_size=12)))


@given(large_parts(), st.integers(0, 2**40))
def test_the_parts_of_a_step_were_named_a_step_before(made: tuple[Case, Int64Array], seed: int) -> None:
    (settings, lengths, sources), _ = made
    named = set(range(len(sources.part_first)))
    for before, documents, _ in walked(made[0], seed):
        assert {part_of(document, sources) for document in documents.document.tolist()} <= named
        named = set(upcoming(before, lengths, settings, sources))
        if isinstance(settings.shuffle, Blocks) and settings.delay is None:
            assert len(named) <= 3 * settings.shuffle.window * len(sources)  # where the step is at a window's end


@given(large_parts(), st.integers(0, 2**40))
def test_parts_that_are_needed_at_a_time_have_room(made: tuple[Case, Int64Array], seed: int) -> None:
    """Each part from the first step of an epoch that needs it to the last, for each source by itself."""
    (settings, _, sources), sizes = made
    room = needed_at_once(settings, sources, sizes[: len(sources.part_first) - 1])
    uses: dict[tuple[int, int, int], list[int]] = {}
    steps = list(walked(made[0], seed))
    for step, (before, documents, _) in enumerate(steps):
        for document, source in zip(documents.document.tolist(), documents.source.tolist(), strict=True):
            key = part_of(document, sources), source, before.sources[source].epoch
            uses.setdefault(key, []).append(step)
    for step in range(len(steps)):
        held = {part for (part, _, _), when in uses.items() if min(when) <= step <= max(when)}
        assert sum(int(sizes[part]) for part in held) <= room


def test_room_is_for_two_windows_of_the_largest_parts_of_each_source() -> None:
    sizes, part_first = np.array([5, 70, 10, 60, 20, 50]), np.arange(0, 61, 10)
    both = sources_of([n % 2 for n in range(30)] + [1] * 30, ("a", "b"), part_first)
    one = one_source(60, part_first)
    by_two = Blocks(window=2)
    assert needed_at_once(settings_of(), one, sizes) == 215
    assert needed_at_once(settings_of(shuffle=by_two), one, sizes) == 70 + 60 + 50 + 20
    assert needed_at_once(settings_of(shuffle=False), one, sizes) == 70 + 60 + 50 + 20
    assert needed_at_once(settings_of(shuffle=Blocks(window=1), mixture=MIXTURE), both, sizes) == 70 + 10 + 70 + 60
    alone = Mixture(sources={"a": SourceOptions(weight=1), "b": SourceOptions(weight=0)})
    assert needed_at_once(settings_of(mixture=alone), both, sizes) == 5 + 70 + 10
    assert needed_at_once(settings_of(**ROWS | {"window": 60}, shuffle=Blocks(window=1)), one, sizes) == 215
