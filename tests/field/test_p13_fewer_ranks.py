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


def read_rank(settings: LoaderSettings, rank: int, state: Any, steps: int) -> tuple[list[set[int]], dict[str, Any]]:
    """The documents of a rank's next steps, and its state after them."""
    found: list[set[int]] = [set()]
    with Loader(settings, rank=rank, mode="inline") as loader:
        if state:
            loader.load_state_dict(state)
        for batch in loader:
            found[-1].update(batch.document_ids.tolist())
            if batch.last_in_step:
                found.append(set())
            if len(found) > steps:
                break
        return found[:-1], loader.state_dict()


def read(settings: LoaderSettings, state: Any = None, steps: int = 1000) -> tuple[list[set[int]], list[dict[str, Any]]]:
    """The documents of each step from all ranks, and every rank's state after them."""
    ranks = [read_rank(settings, rank, state, steps) for rank in range(settings.ranks)]
    return [set.union(*step) for step in zip(*(found for found, _ in ranks), strict=True)], [
        after for _, after in ranks
    ]


@pytest.mark.parametrize("ranks", [2, 1])
def test_what_was_used_before_and_after_is_everything_once_in_the_same_order(
    settings: LoaderSettings, ranks: int
) -> None:
    uninterrupted = [{document for document, _, _ in step} for step in global_batches(Feed(settings))]
    assert [len(step) for step in uninterrupted] == [BATCH] * (DOCUMENTS // BATCH)
    before, states = read(settings, steps=USED)
    assert all(state == states[0] for state in states)  # any rank's state is the state of all
    after, _ = read(replace(settings, ranks=ranks), states[0])
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
    _, states = read(settings, steps=USED)
    with Loader(settings, rank=0, mode="inline") as loader:
        for name in states[0]["stream"]:
            broken = states[0] | {"stream": {k: v for k, v in states[0]["stream"].items() if k != name}}
            with pytest.raises(ValueError, match="stream state"):
                loader.load_state_dict(broken)
