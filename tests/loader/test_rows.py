"""Batching `rows`: windows of the stream in rows of one capacity, as many in each step, on every rank."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh.loader.feed import Feed
from seqmesh.loader.mixture import Mixture, SourceOptions
from seqmesh.loader.planner import Step, next_step
from seqmesh.loader.rows import plan_window
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.sources import one_source, sources_by_code
from seqmesh.loader.stream import StreamState, start_state
from seqmesh.packer.cost import CostModel
from seqmesh.packer.plan import check_plan
from tests.loader.reference import SHUFFLES, plain_order, some_parts
from tests.support import every_label, global_batches, long_tail, make_set

Piece = tuple[int, int, int]


def rows_of(**changes: Any) -> LoaderSettings:
    defaults: dict[str, Any] = {
        "data": "set",
        "batching": "rows",
        "rows_per_step": 4,
        "capacity": 10,
        "overlong": "split",
        "epochs": 1,
        "seed": 0,
    }
    return LoaderSettings(**defaults | changes)


def walked(lengths: list[int], settings: LoaderSettings, state: StreamState | None = None) -> list[Step]:
    array, steps = np.array(lengths, np.int64), []
    state, sources = state or StreamState(seed=settings.seed or 0), one_source(len(lengths), some_parts(len(lengths)))
    while (step := next_step(state, array, every_label, settings, sources)) is not None:
        steps.append(step)
        state = step.after
    return steps


def pieces_of(step: Step) -> list[Piece]:
    columns = (step.documents.document, step.documents.offset, step.documents.length)
    return [(a, b, c) for a, b, c in np.stack(columns, axis=1).tolist()]


def order_of(lengths: list[int], settings: LoaderSettings, epoch: int) -> list[Piece]:
    """All pieces of an epoch, in the order of the stream."""
    most, parts = settings.longest, some_parts(len(lengths)).tolist()
    order = plain_order(range(len(lengths)), parts, settings.shuffle, settings.seed or 0, epoch)
    pieces: list[Piece] = []
    for document in order:
        length = lengths[document]
        if settings.overlong == "split":
            pieces += [(document, at, min(most, length - at)) for at in range(0, length, most)]
        elif length <= most or settings.overlong == "truncate":
            pieces.append((document, 0, min(length, most)))
    return pieces


def by_window(steps: list[Step]) -> list[list[Step]]:
    windows: list[list[Step]] = []
    for step in steps:
        if step.before.window_step == 0:
            windows.append([])
        windows[-1].append(step)
    return windows


def epoch_of(window: list[Step]) -> int:
    """The one its documents are of; before its first step, the rest of an epoch may have been dropped."""
    after = window[-1].after
    source = after.sources[0]
    return after.epoch - (source.position == source.offset == 0)


cases = st.tuples(
    st.lists(st.integers(1, 25), min_size=12, max_size=70),
    st.builds(
        rows_of,
        rows_per_step=st.sampled_from([1, 2, 6]),
        window=st.sampled_from([6, 7, 20, None]),
        tail=st.sampled_from([None, "pad", "drop"]),
        overlong=st.sampled_from(["split", "truncate"]),
        max_document=st.integers(4, 10),
        shuffle=st.sampled_from(SHUFFLES),
        epochs=st.integers(1, 2),
        seed=st.integers(0, 2**40),
        cost=st.sampled_from([None, CostModel(quadratic=3)]),
    ),
)


@given(cases)
def test_windows_are_slices_of_the_stream_and_steps_share_them_out(case: tuple[list[int], LoaderSettings]) -> None:
    lengths, settings = case
    assert settings.rows_per_step is not None
    steps = walked(lengths, settings)
    windows, dropped, left = by_window(steps), 0, list[Piece]()
    for epoch in range(settings.epochs or 1):
        left = order_of(lengths, settings, epoch)
        for window in (window for window in windows if epoch_of(window) == epoch):
            found = [piece for step in window for piece in pieces_of(step)]
            ends = window[-1].after.epoch > epoch
            size = len(left) if ends else len(found)
            assert not Counter(found) - Counter(left[:size])
            assert len(found) == size or settings.tail == "drop"
            assert ends or 0 <= settings.documents_per_window - len(found) < settings.rows_per_step
            whole = window[:-1] if ends and settings.tail != "drop" else window
            assert all(len(rows_in(step)) == settings.rows_per_step for step in whole)
            dropped, left = dropped + size - len(found), left[size:]
        dropped += len(left)  # fewer than a step needs, in a window of their own
        assert not left or (settings.tail == "drop" and len(left) < settings.rows_per_step)
    assert steps[-1].after.dropped == dropped - len(left)
    assert steps[-1].after.tokens == sum(step.plan.tokens for step in steps)


def rows_in(step: Step) -> list[list[int]]:
    """Lengths in each row that holds any, in order."""
    plan, rows = step.plan, dict[tuple[int, int], list[int]]()
    for rank, wave, document in zip(plan.rank.tolist(), plan.wave.tolist(), plan.document.tolist(), strict=True):
        rows.setdefault((rank, wave), []).append(int(plan.lengths[document]))
    return list(rows.values())


@given(cases, st.sampled_from([1, 2, 3, 6]), st.sampled_from(["free", "waves"]))
def test_every_rank_has_equally_many_rows_of_the_same_steps(
    case: tuple[list[int], LoaderSettings], ranks: int, mode: Any
) -> None:
    lengths, settings = case
    settings = replace(settings, rows_per_step=6, window=None)
    alone = walked(lengths, settings)
    shared = walked(lengths, replace(settings, ranks=ranks, mode=mode))
    assert [(pieces_of(step), step.before, step.after) for step in shared] == [
        (pieces_of(step), step.before, step.after) for step in alone
    ]
    for one, step in zip(alone, shared, strict=True):
        assert step.plan.waves.tolist() == [6 // ranks] * ranks
        assert rows_in(one) == rows_in(step)
        assert step.plan.supervised_tokens == one.plan.supervised_tokens == expected_supervised(step)
        used = np.zeros(ranks, np.int64)
        np.maximum.at(used, step.plan.rank, step.plan.wave + 1)
        real = used if mode == "free" else np.full(ranks, used.max())  # fillers at the end are for the loader alone
        check_plan(replace(step.plan, waves=real), step.documents.length, ranks=ranks, capacity=10)


def expected_supervised(step: Step) -> int:
    return sum(length - 1 for _, _, length in pieces_of(step))


def test_what_is_dropped_at_an_epochs_end_is_neither_always_the_same_nor_always_short() -> None:
    lengths = [6 + n % 5 for n in range(43)]  # one document a row
    for shuffle in (True, False):
        settings = rows_of(tail="drop", rows_per_step=10, epochs=6, shuffle=shuffle)
        steps = walked(lengths, settings)
        assert len(steps) == 6 * 4
        epochs = [steps[4 * n : 4 * n + 4] for n in range(6)]
        dropped = [set(range(43)) - {piece[0] for step in epoch for piece in pieces_of(step)} for epoch in epochs]
        assert [len(each) for each in dropped] == [3] * 6
        assert [epoch[-1].after.dropped for epoch in epochs] == [3, 6, 9, 12, 15, 18]
        assert len(set().union(*dropped)) > 9
        assert len({lengths[document] for each in dropped for document in each}) > 2


def test_no_more_rows_than_documents_need_and_rows_of_a_step_cost_alike() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.4, 1.5, 4000), 1, 8192).astype(int).tolist()
    cost = CostModel(linear=4000, quadratic=1)
    steps = walked(lengths, rows_of(capacity=8192, rows_per_step=8, ranks=8, cost=cost))
    assert sum(lengths) / (len(steps) * 8 * 8192) > 0.97
    assert float(np.mean([step.plan.imbalance for step in steps])) < 1.02


def test_weights_change_at_a_windows_end_whatever_the_state_that_is_restored() -> None:
    lengths, codes = [5] * 400, np.arange(400, dtype=np.uint16) % 2
    sources = sources_by_code(codes, ("a", "b"))

    def settings_of(a: float, b: float) -> LoaderSettings:
        options = {"a": SourceOptions(weight=a), "b": SourceOptions(weight=b)}
        return rows_of(window=40, mixture=Mixture(sources=options))

    def steps_of(state: StreamState, settings: LoaderSettings, count: int) -> list[Step]:
        array, steps = np.array(lengths), list[Step]()
        while len(steps) < count and (step := next_step(state, array, every_label, settings, sources)):
            steps.append(step)
            state = step.after
        return steps

    even = steps_of(start_state(0, 2), settings_of(1, 1), 10)
    assert [step.before.window_step for step in even] == [0, 1, 2, 3, 4] * 2
    for number in range(1, 6):
        on = steps_of(even[number].before, settings_of(1, 3), 10)
        same = 5 - number
        assert [pieces_of(step) for step in on[:same]] == [pieces_of(step) for step in even[number:5]]
        of_b = sum(int(codes[piece[0]]) for step in on[same : same + 5] for piece in pieces_of(step))
        assert of_b == 30
    everything = steps_of(even[3].before, settings_of(1, 3), 1000)
    seen = Counter(piece[0] for step in even[:3] + everything for piece in pieces_of(step))
    assert seen == Counter(range(400))


def test_a_window_is_planned_once_while_its_steps_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def counting(begun: StreamState, *arguments: Any) -> Any:
        planned.append(begun)
        return plan_window(begun, *arguments)

    monkeypatch.setattr("seqmesh.loader.feed.plan_window", counting)
    feed = Feed(rows_of(data=str(make_set(tmp_path, long_tail(200, 40))), capacity=40, window=60))
    steps = global_batches(feed)
    assert len(steps) > 2 * len(planned)
    assert len(planned) == len(set(planned))


def test_a_state_past_its_window_is_refused() -> None:
    state = StreamState(seed=0, step=9, window_step=9, sources=(replace(StreamState(seed=0).sources[0], share=1),))
    with pytest.raises(ValueError, match="window_step is 9: the window has 2 steps"):
        next_step(state, np.full(9, 5), every_label, rows_of())
