"""Announced steps against a reference that draws and plans every one of them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.loader import steps as steps_module
from seqmesh.loader.ask import ask_steps
from seqmesh.loader.client import Client
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderTimeoutError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.keys import create_keys
from seqmesh.loader.mixture import Mixture, SourceOptions, WeightChange
from seqmesh.loader.planner import next_step
from seqmesh.loader.settings import Blocks, Delay, LoaderSettings
from seqmesh.loader.sources import Sources, one_source, sources_by_code
from seqmesh.loader.steps import count_steps, walk_steps
from seqmesh.loader.stream import SKIPPED, StreamState, start_state
from seqmesh.packer.lengths import Int64Array
from tests.serving import SECONDS, digests_inline, free_port, served_here, take, wait_until
from tests.support import every_label, long_tail, make_set, settings_for


def states_of(lengths: Int64Array, settings: LoaderSettings, sources: Sources) -> list[StreamState]:
    """Where every step begins, and the end: by planning all of them."""
    states = [start_state(settings.seed or 0, len(sources))]
    while (step := next_step(states[-1], lengths, every_label, settings, sources)) is not None:
        states.append(step.after)
    return states


def check(lengths: Int64Array, settings: LoaderSettings, sources: Sources) -> None:
    """From the start and from anywhere else the count is what is delivered."""
    states = states_of(lengths, settings, sources)
    for state in (states[0], states[len(states) // 2], states[-1]):
        assert count_steps(state, lengths, settings, sources) == len(states) - 1 == states[-1].step


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    st.sampled_from(["truncate", "split", "drop"]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([(17, None), (30, None), (40, Delay(thresholds=(4, 8), release=2)), (16, Delay((3,), 4))])
    if False
    else st.integers(16, 50),
    st.sampled_from([None, Delay(thresholds=(4, 8), release=2), Delay(thresholds=(3,), release=2)]),
)
def test_batching_tokens(
    lengths: list[int], overlong: Any, epochs: int, shuffle: bool | Blocks, tokens: int, delay: Delay | None
) -> None:
    if overlong == "drop" and all(length > 8 or length == 0 for length in lengths):
        return
    made = LoaderSettings(
        data="x",
        tokens_per_step=tokens,
        capacity=8,
        overlong=overlong,
        epochs=epochs,
        shuffle=shuffle,
        delay=delay,
        seed=tokens,
    )
    files_of_five = np.append(np.arange(0, len(lengths), 5), len(lengths))
    check(np.array(lengths, np.int64), made, one_source(len(lengths), files_of_five))


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 12), min_size=3, max_size=60),
    st.sampled_from(["truncate", "split", "drop"]),
    st.sampled_from(["pad", "drop"]),
    st.integers(1, 3),
    st.integers(3, 30),
)
def test_batching_rows(lengths: list[int], overlong: Any, tail: Any, rows: int, window: int) -> None:
    if sum(length <= 8 for length in lengths) < rows:
        return
    made = LoaderSettings(
        data="x",
        batching="rows",
        rows_per_step=rows,
        window=window,
        tail=tail,
        capacity=8,
        overlong=overlong,
        epochs=2,
        seed=window,
    )
    check(np.array(lengths, np.int64), made, one_source(len(lengths)))


MIXTURES = [
    Mixture(sources={"a": SourceOptions(weight=0.7, epochs=3), "b": SourceOptions(weight=0.3, epochs=1)}),
    Mixture(sources={"a": SourceOptions(weight=1, epochs=2), "b": SourceOptions(weight=1)}, exhausted="stop"),
    Mixture(
        sources={"a": SourceOptions(weight=1, overlong="drop"), "b": SourceOptions(weight=0, epochs=9)},
        changes=(WeightChange(step=3, weights={"a": 1, "b": 2}), WeightChange(step=9, weights={"a": 1, "b": 0})),
    ),
    Mixture(  # has an end for its last weights alone
        sources={"a": SourceOptions(weight=1, epochs=2), "b": SourceOptions(weight=3, epochs=None)},
        changes=(WeightChange(step=7, weights={"a": 1, "b": 0}),),
    ),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=range(len(MIXTURES)))
@pytest.mark.parametrize("batching", ["tokens", "rows"])
def test_mixtures(mixture: Mixture, batching: str) -> None:
    rng = np.random.default_rng(5)
    for seed in range(5):
        lengths = rng.integers(0, 14, 120)
        sources = sources_by_code(rng.integers(0, 2, 120).astype(np.uint16), ["a", "b"])
        sizes: dict[str, Any] = (
            {"tokens_per_step": 40} if batching == "tokens" else {"batching": "rows", "rows_per_step": 3, "window": 16}
        )
        endless_alone = mixture.sources["b"].epochs is None
        made = LoaderSettings(
            data="x",
            capacity=10,
            overlong="split",
            mixture=mixture,
            epochs=None if endless_alone else 1,
            seed=seed,
            **sizes,
        )
        check(lengths, made, sources)


def test_resumed_with_other_weights_or_more_epochs_the_count_goes_on_from_there() -> None:
    lengths, sources = np.full(60, 5), sources_by_code(np.repeat([0, 1], 30).astype(np.uint16), ["a", "b"])
    weights = [SourceOptions(weight=w, epochs=1) for w in (1, 3)]
    before = LoaderSettings(
        data="x", tokens_per_step=40, capacity=10, seed=1, mixture=Mixture(sources={"a": weights[0], "b": weights[1]})
    )
    after = replace(before, mixture=Mixture(sources={"a": weights[1], "b": weights[0]}))
    state = states_of(lengths, before, sources)[3]
    remaining = 0
    walked: StreamState | None = state
    while walked is not None and (step := next_step(walked, lengths, every_label, after, sources)) is not None:
        walked, remaining = step.after, remaining + 1
    assert count_steps(state, lengths, after, sources) == 3 + remaining


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        (None, "epochs is None: the job has no end"),
        ({"a": (1, 1), "b": (1, None)}, "epochs is None for b in the mixture: the job has no end"),
        ({"a": (1, None), "b": (1, None)}, "epochs is None for a, b in the mixture"),
    ],
)
def test_a_job_without_an_end_has_no_number_of_steps(mixture: Any, words: str) -> None:
    made = LoaderSettings(data="x", tokens_per_step=40, capacity=10, seed=1)
    sources = one_source(20)
    if mixture:
        options = {name: SourceOptions(weight=weight, epochs=epochs) for name, (weight, epochs) in mixture.items()}
        made = replace(made, mixture=Mixture(sources=options))
        sources = sources_by_code(np.repeat([0, 1], 10).astype(np.uint16), ["a", "b"])
    with pytest.raises(ValueError, match=words):
        count_steps(start_state(1, len(sources)), np.full(20, 5), made, sources)


def test_it_pauses_after_so_many_documents_and_counts_quickly() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 3 * SKIPPED)
    made = LoaderSettings(data="x", tokens_per_step=8192, capacity=2000, epochs=1, seed=1)
    sources, state = one_source(len(lengths)), start_state(1, 1)
    list(walk_steps(state, lengths[:10], made, one_source(10)))  # compiles
    begin = time.perf_counter()
    walked = list(walk_steps(state, lengths, made, sources))
    assert 4 <= len(walked) <= 6
    assert walked[-1].step > lengths.sum() / 8192
    assert time.perf_counter() - begin < 10


def test_a_loader_process_counts_while_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counting is held up: batches and heartbeats go on meanwhile, and whoever asks is told when it is done."""
    settings = settings_for(make_set(tmp_path / "set", long_tail(60, 50)))
    endpoint, go_on = f"ipc://{tmp_path}/loader", threading.Event()
    real = steps_module.walk_steps

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(SECONDS)
        yield from real(*arguments)

    monkeypatch.setattr(steps_module, "walk_steps", slow)
    expected = digests_inline(settings, 0)
    state = Feed(settings).start
    with served_here(settings, endpoint):
        client = Client(endpoint, rank=0, credit=1 << 20, timeout=SECONDS)
        client.subscribe(Position(state))
        got = take(client, 3)
        with pytest.raises(LoaderTimeoutError, match="it is still counting"):
            ask_steps(endpoint, state, timeout=0.3)
        got += take(client, 3)
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(client.count_steps(state)))
        asking.start()
        got += take(client)
        assert got == expected
        go_on.set()
        asking.join()
        client.close()
    assert answers == [len(states_of(Feed(settings).shards.lengths, settings, one_source(60))) - 1]


def test_an_unfit_question_is_answered_in_words_and_nobody_is_disturbed(tmp_path: Path) -> None:
    settings = settings_for(make_set(tmp_path / "set", [5] * 40))
    endpoint, start = f"ipc://{tmp_path}/loader", Feed(settings).start
    with served_here(settings, endpoint) as service:
        outside = replace(start, sources=(replace(start.sources[0], position=99),))
        with pytest.raises(ValueError, match=r"position 99 .* is outside the 40 documents"):
            ask_steps(endpoint, outside, timeout=SECONDS)
        with pytest.raises(ValueError, match="batching 'rows'"):
            ask_steps(endpoint, replace(start, step=3, window_step=2), timeout=SECONDS)
        for step in range(20):  # more than are remembered
            assert ask_steps(endpoint, replace(start, step=step), timeout=SECONDS) == 2 + step
        assert service.counters.refused == 0
        wait_until(lambda: not any(t.name == "step counter" for t in threading.enumerate()))


def test_the_question_outlives_a_loader_and_goes_where_keys_are_needed(tmp_path: Path) -> None:
    """Nobody is there when it is asked; then a loader is, which answers strangers nothing."""
    settings = settings_for(make_set(tmp_path / "set", [5] * 40))
    start, endpoint, keys = Feed(settings).start, f"tcp://127.0.0.1:{free_port()}", tmp_path / "keys"
    create_keys(keys)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask_steps, endpoint, start, timeout=SECONDS, keys=keys)
        time.sleep(0.1)
        with served_here(settings, endpoint, keys=keys):
            assert answer.result() == 2
            with pytest.raises(LoaderTimeoutError):
                ask_steps(endpoint, start, timeout=0.3)


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(LoaderTimeoutError, match="is it running"):
        ask_steps(f"ipc://{tmp_path}/nobody", start_state(0, 1), timeout=0.2)


@pytest.mark.parametrize("mode", ["inline", "process"])
def test_len_is_what_a_rank_gets_of_rows(tmp_path: Path, mode: Any) -> None:
    data = make_set(tmp_path, [5] * 50)
    rows = settings_for(data, batching="rows", tokens_per_step=None, rows_per_step=4, capacity=10, ranks=2, epochs=2)
    with Loader(rows, rank=1, mode=mode) as loader:
        assert len(loader) == 2 * loader.steps
        assert len(list(loader)) == len(loader)
    tokens = settings_for(data, capacity=10)
    with Loader(tokens, mode=mode) as loader:
        with pytest.raises(TypeError, match="`steps` says how many"):
            len(loader)
        assert loader  # is an object like any other
        assert list(loader)[-1].step + 1 == loader.steps  # list asks for len, and does without
    with Loader(replace(rows, epochs=None), rank=0, mode=mode) as loader:
        with pytest.raises(TypeError, match="no len: epochs is None: the job has no end"):
            len(loader)
        with pytest.raises(ValueError, match="the job has no end"):
            _ = loader.steps
