"""A run that was resumed on fewer ranks took the position of some of the old ranks and forgot the others'."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed
from seqmesh.loader.settings import LoaderSettings
from tests.support import global_batches, make_set, settings_for

DOCUMENTS, BATCH, USED = 100, 4, 10  # a global batch of four documents, ten of them before the run is interrupted

BATCHINGS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens_per_step": 40, "capacity": 10},
    "rows": {"batching": "rows", "tokens_per_step": None, "rows_per_step": BATCH, "capacity": 10},
    "rows, in windows": {
        "batching": "rows",
        "tokens_per_step": None,
        "rows_per_step": BATCH,
        "capacity": 10,
        "window": 12,
    },
}


@pytest.fixture(params=BATCHINGS)
def settings(tmp_path: Path, request: pytest.FixtureRequest) -> LoaderSettings:
    data = make_set(tmp_path, [10] * DOCUMENTS)
    return settings_for(data, ranks=4, seed=11, **BATCHINGS[request.param])


def read(settings: LoaderSettings, states: list[dict[str, Any]] | None = None, steps: int = 1000) -> list[set[int]]:
    """The documents of each step, from all ranks; `states`: each rank's before, replaced by those after."""
    found: list[set[int]] = []
    after = []
    for rank in range(settings.ranks):
        with Loader(settings, rank=rank, mode="inline") as loader:
            if states:
                loader.load_state_dict(states[0])
            done, mine = 0, list[set[int]]()
            mine.append(set())
            for batch in loader:
                mine[-1].update(batch.document_ids.tolist())
                if batch.last_in_step:
                    done += 1
                    if done == steps:
                        break
                    mine.append(set())
            after.append(loader.state_dict())
        found = [a | b for a, b in zip(found, mine, strict=True)] if found else mine
    if states is not None:
        states[:] = after
    return [step for step in found if step]


@pytest.mark.parametrize("ranks", [2, 1])
def test_what_was_used_before_and_after_is_everything_once_in_the_same_order(
    settings: LoaderSettings, ranks: int
) -> None:
    uninterrupted = [{document for document, _, _ in step} for step in global_batches(Feed(settings))]
    assert [len(step) for step in uninterrupted] == [BATCH] * (DOCUMENTS // BATCH)
    states: list[dict[str, Any]] = []
    before = read(settings, states, USED)
    assert all(state == states[0] for state in states)  # any rank's state is the state of all
    after = read(replace(settings, ranks=ranks), states)
    assert before == uninterrupted[:USED]
    assert after == uninterrupted[USED:]
    assert sorted(document for step in before + after for document in step) == list(range(DOCUMENTS))


def test_more_ranks_than_the_batch_has_rows_are_refused_naming_both(settings: LoaderSettings) -> None:
    more = replace(settings, ranks=8)
    if settings.batching == "tokens":  # four ranks have nothing to do, and the batch is the same
        assert global_batches(Feed(more)) == global_batches(Feed(settings))
        return
    with pytest.raises(ValueError, match="rows_per_step is 4: 8 ranks can not share them evenly"):
        Loader(more, rank=0, mode="inline")


def test_a_state_that_lacks_a_part_is_refused_and_nothing_begins_anew(settings: LoaderSettings) -> None:
    states: list[dict[str, Any]] = []
    read(settings, states, USED)
    with Loader(settings, rank=0, mode="inline") as loader:
        for name in states[0]["stream"]:
            broken = states[0] | {"stream": {k: v for k, v in states[0]["stream"].items() if k != name}}
            with pytest.raises(ValueError, match="stream state"):
                loader.load_state_dict(broken)
