"""Ranks had uneven numbers of batches: the last one waited for ever, or the tail was never trained on."""

from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings
from tests.support import make_set, settings_for

DOCUMENTS, RANKS, EACH = 100, 7, 3  # documents of one row; rows of a rank in each step


def settings_of(folder: Path, tail: Any) -> LoaderSettings:
    data = make_set(folder, [10] * DOCUMENTS)
    rows = {"batching": "rows", "tokens_per_step": None, "rows_per_step": RANKS * EACH, "capacity": 10}
    return settings_for(data, ranks=RANKS, seed=3, epochs=2, tail=tail, **rows)


def by_epoch(settings: LoaderSettings, rank: int) -> tuple[list[list[list[int]]], list[int]]:
    """Documents of each of a rank's rows in both epochs, and how many documents the state counts as dropped after
    each."""
    rows: list[list[list[int]]] = [[], []]
    dropped = [0, 0]
    with Loader(settings, rank=rank, mode="inline") as loader:
        for batch in loader:
            assert batch.waves == EACH and batch.tokens == 10 * len(batch.document_ids)
            assert int((batch.labels != -100).sum()) == 9 * len(batch.document_ids)
            rows[batch.epoch].append(batch.document_ids.tolist())
            dropped[batch.epoch] = sum(loader.state_dict()["stream"]["dropped"])
    return rows, dropped


def test_padding_gives_all_ranks_five_steps_and_five_rows_of_nothing(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "pad")
    ranks = [by_epoch(settings, rank)[0] for rank in range(RANKS)]
    for epoch in (0, 1):
        assert [len(rows[epoch]) for rows in ranks] == [5 * EACH] * RANKS
        rows = [row for rank in ranks for row in rank[epoch]]
        assert rows.count([]) == 5  # of no tokens, so of weight 0
        assert sorted(document for row in rows for document in row) == list(range(DOCUMENTS))


def test_dropping_gives_all_ranks_four_steps_and_leaves_out_other_documents_each_time(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "drop")
    ranks = [by_epoch(settings, rank) for rank in range(RANKS)]
    left_out = []
    for epoch in (0, 1):
        assert [len(rows[epoch]) for rows, _ in ranks] == [4 * EACH] * RANKS
        assert [dropped[epoch] for _, dropped in ranks] == [16 * (epoch + 1)] * RANKS
        documents = [document for rows, _ in ranks for row in rows[epoch] for document in row]
        assert len(documents) == len(set(documents)) == DOCUMENTS - 16
        left_out.append(set(range(DOCUMENTS)) - set(documents))
    assert left_out[0] != left_out[1]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_seven_ranks_or_any_other_number_have_equally_many_micro_batches_of_tokens(tmp_path: Path, ranks: int) -> None:
    data = make_set(tmp_path, [10] * DOCUMENTS)
    settings = settings_for(data, ranks=ranks, tokens_per_step=30 * ranks, capacity=30, mode="waves")
    counts = set()
    for rank in range(ranks):
        with Loader(settings, rank=rank, mode="inline") as loader:
            counts.add(tuple((batch.step, batch.wave, batch.waves) for batch in loader))
    assert len(counts) == 1
