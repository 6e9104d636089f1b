"""What is left out of a ledger, because it goes without saying, is read as if it had been written."""

from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.feed import Feed
from seqmesh.loader.ledger.entries import LISTS, state_of, trivial_lists
from seqmesh.loader.ledger.file import read_file, record_at, record_of
from seqmesh.loader.ledger.recorder import Recorder
from seqmesh.loader.mixture import Mixture, SourceOptions
from seqmesh.loader.settings import LoaderSettings
from tests.support import long_tail, make_set, settings_for

MIXTURE = Mixture(sources={"web": SourceOptions(weight=1), "code": SourceOptions(weight=1, overlong="split")})
ALL = {"offset", "source", "ring_sizes", "ring_ranks"}
CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({"ranks": 1}, ALL),
    ({"ranks": 2, "capacity": 24, "max_document": 40}, {"offset", "source"}),
    ({"ranks": 1, "overlong": "split", "max_document": 9}, ALL - {"offset"}),
    ({"ranks": 1, "mixture": MIXTURE, "max_document": 9, "overlong": "truncate"}, {"ring_sizes", "ring_ranks"}),
]


def settings_of(folder: Path, changes: dict[str, Any]) -> LoaderSettings:
    names = ["code" if n % 3 == 0 else "web" for n in range(60)]
    data = make_set(folder, long_tail(60, 40), sources=names)
    return settings_for(data, **{"capacity": 40} | changes).resolved()


@pytest.mark.parametrize(("changes", "trivial"), CASES)
def test_records_are_those_of_steps_that_were_written_in_full(
    tmp_path: Path, changes: dict[str, Any], trivial: set[str]
) -> None:
    settings = settings_of(tmp_path / "set", changes)
    assert trivial_lists(settings) == trivial
    feed = Feed(settings)
    first = feed.step(feed.start)
    assert first is not None
    second = feed.step(first.after)
    assert second is not None
    third = feed.step(second.after)
    assert third is not None
    steps = [first, second, first, third]  # states that the row before tells, and such that it does not
    recorder = Recorder(tmp_path, feed)
    for step in steps:
        recorder.begin(step, (0, 0))
    recorder.close()
    file = read_file(recorder.path)
    (batch,) = file.batches
    empty = {name for name in LISTS if not any(batch.column(name).to_pylist())}
    assert (empty, [bool(state) for state in batch.column("before").to_pylist()]) == (
        trivial,
        [True, False, True, True],
    )
    for row, step in enumerate(steps):
        found = record_at(file, 0, row)
        whole = record_of(step, file.head, found.time)
        for name in ("step", "epoch", "plan", "tokens", "supervised_tokens", "rings", "imbalance", "before", "after"):
            assert getattr(found, name) == getattr(whole, name)
        for name in LISTS:
            assert getattr(found, name).tolist() == getattr(whole, name).tolist()


@pytest.mark.parametrize("integers", [[], [1, 2, 3], [0, 0, 0, 2, 1, 5], [0, 0, 0, 2, 1, *[0] * 8, 7], [-1] * 30])
def test_what_is_no_state_is_refused(integers: list[int]) -> None:
    with pytest.raises(ValueError, match="stream state"):
        state_of(integers)
