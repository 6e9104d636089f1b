"""Which parts hold a source's documents, by plain counting; and the settings of a shuffle."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.feed import Feed
from seqmesh.loader.manifest import read_manifest
from seqmesh.loader.settings import Blocks, Delay, LoaderSettings, make_settings
from seqmesh.loader.sources import Sources, one_source, sources_by_code
from seqmesh.loader.stream import StreamState, draw, start_state
from tests.loader.reference import SHUFFLES, plain_order, plain_windows, some_parts
from tests.support import global_batches, make_set, settings_for


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_parts_of_a_source_are_those_that_hold_documents_of_it(held: list[int], data: st.DataObject) -> None:
    """Also where documents are left out of everything."""
    part_first = np.cumsum([0, *held])
    size = st.lists(st.sampled_from([0, 1, None]), min_size=sum(held), max_size=sum(held))
    codes = data.draw(size)
    of = [[document for document, code in enumerate(codes) if code == number] for number in (0, 1)]
    sources = Sources(
        names=("a", "b"),
        first=np.cumsum([0, *map(len, of)]),
        documents=np.array(of[0] + of[1], np.int64),
        part_first=part_first,
    )
    for documents, parts in zip(of, sources.parts, strict=True):
        counts = [sum(a <= document < b for document in documents) for a, b in pairwise(part_first.tolist())]
        assert parts.number.tolist() == [number for number, count in enumerate(counts) if count]
        assert np.diff(parts.first).tolist() == [count for count in counts if count]
        places = np.arange(len(documents))
        assert parts.of(places).tolist() == [number for number, count in enumerate(counts) for _ in range(count)]


def test_one_source_has_all_parts_that_are_not_empty() -> None:
    parts = one_source(7, np.array([0, 3, 3, 7])).parts[0]
    assert (parts.number.tolist(), parts.first.tolist()) == ([0, 2], [0, 3, 7])
    assert one_source(7).parts[0].first.tolist() == [0, 7]
    for nothing in (one_source(0), one_source(3, np.array([0, 2, 3]), np.zeros(3, np.bool_))):
        assert nothing.parts[0].number.tolist() == nothing.parts[0].table(2, 0).tolist() == []


@given(
    st.lists(st.booleans(), min_size=2, max_size=40).filter(any),
    st.sampled_from(SHUFFLES),
    st.sampled_from([None, Delay(thresholds=(8,), release=2)]),
    st.integers(0, 2**40),
)
def test_documents_that_are_left_out_are_not_served_and_the_others_once_an_epoch(
    usable: list[bool], shuffle: bool | Blocks, delay: Delay | None, seed: int
) -> None:
    """Also where some are cut into pieces, or held back; and from any state on."""
    settings = LoaderSettings(
        data="set", capacity=10, tokens_per_step=20, overlong="split", epochs=2, shuffle=shuffle, delay=delay
    )
    lengths, part_first = 1 + np.arange(len(usable)) * 7 % 13, some_parts(len(usable))
    sources = one_source(len(usable), part_first, np.array(usable))
    steps, states = list[list[int]](), [start_state(seed, 1)]
    while (drawn := draw(states[-1], lengths, settings, sources)) is not None:
        steps.append(drawn[0].document[drawn[0].offset == 0].tolist())
        states.append(drawn[1])
    kept = [document for document, good in enumerate(usable) if good]
    orders = [plain_order(kept, part_first.tolist(), shuffle, seed, epoch) for epoch in (0, 1)]
    served = [document for step in steps for document in step]
    if delay is None:
        assert served == orders[0] + orders[1]
    assert sorted(served[: len(kept)]) == sorted(served[len(kept) :]) == kept
    for number, state in enumerate(states[:-1]):
        again = draw(StreamState.from_dict(state.to_dict()), lengths, settings, sources)
        assert again is not None and again[1] == states[number + 1]


def test_an_order_is_made_once_for_an_epoch() -> None:
    sources = sources_by_code(np.arange(60, dtype=np.uint16) % 2, ("a", "b"), np.arange(0, 61, 5))
    order = sources.order(3, (5, 6))
    assert sources.order(3, (5, 6)) is order
    assert sources.order(3, (5, 7)) is not order
    assert sources.parts[0].table(3, 5) is sources.parts[0].table(3, 5)
    assert order.of(1)[1].tolist() == sources.parts[1].table(3, 6).tolist()
    assert len(sources.order(None, (5, 6)).blocks) == 0


def test_a_loader_shuffles_the_files_of_its_set(tmp_path: Path) -> None:
    """By blocks of files as the set has them, and in another order in each epoch."""
    feed = Feed(settings_for(make_set(tmp_path, [10] * 100), shuffle=Blocks(window=2), tokens_per_step=10, epochs=3))
    first = feed.shards.part_first.tolist()
    assert (
        first == [0, *np.cumsum([shard.rows for shard in read_manifest(tmp_path).shards]).tolist()] and len(first) == 6
    )
    served = [step[0][0] for step in global_batches(feed)]
    epochs = [served[start : start + 100] for start in (0, 100, 200)]
    for epoch, order in enumerate(epochs):
        windows = plain_windows(range(100), first, Blocks(window=2), 0, epoch)
        assert order == [document for window in windows for document in window] != list(range(100))
    assert len({tuple(order) for order in epochs}) == 3


@pytest.mark.parametrize("shuffle", [True, False, Blocks(), Blocks(window=3), Blocks(window=1 << 40)])
def test_a_shuffle_travels_as_json(shuffle: bool | Blocks) -> None:
    settings = LoaderSettings(data="/set", capacity=8, tokens_per_step=8, seed=1, shuffle=shuffle)
    assert LoaderSettings.from_json(settings.to_json()) == settings == settings.resolved()
    plain = {"window": shuffle.window} if isinstance(shuffle, Blocks) else shuffle
    assert json.loads(settings.to_json())["shuffle"] == json.loads(json.dumps(settings.order()))["shuffle"] == plain
    assert make_settings({"data": "/set", "capacity": 8, "tokens_per_step": 8, "seed": 1, "shuffle": plain}) == settings
    assert type(make_settings(json.loads(settings.to_json())).shuffle) is type(shuffle)


@pytest.mark.parametrize(
    ("shuffle", "message"),
    [
        ({"window": 0}, "shuffle.window is 0: must be at least 1, and at most"),
        ({"window": -4}, "shuffle.window is -4: must be at least 1"),
        ({"window": 1 << 50}, "shuffle.window is 1125899906842624: must be at least 1"),
        ({"windows": 4}, "windows: is not a setting"),
        ({"window": "a"}, "shuffle.*window: .* integer"),
        ("blocks", "shuffle"),
    ],
)
def test_a_shuffle_that_there_is_not_is_refused(shuffle: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_settings({"data": "set", "capacity": 8, "tokens_per_step": 8, "shuffle": shuffle})


@pytest.mark.parametrize("shuffle", [{"window": 4}, None, 1, "true"])
def test_settings_made_by_hand_take_no_map_for_a_shuffle(shuffle: Any) -> None:
    with pytest.raises(ValueError, match=r"shuffle is .*: must be true, false, or Blocks\(window=N\)"):
        LoaderSettings(data="set", capacity=8, tokens_per_step=8, shuffle=shuffle)
