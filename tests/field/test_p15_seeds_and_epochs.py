"""The same seed in every reader, or the same order in every epoch: documents came twice, others never."""

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed
from seqmesh.loader.order import Order
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.trainer.parallel import Ranks
from tests.ranks import run_ranks
from tests.serving import SECONDS, server_process
from tests.support import global_batches, make_set, settings_for

DOCUMENTS, RANKS, READERS = 64, 2, 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"), [10] * DOCUMENTS)


def settings_of(data: Path, **changes: Any) -> LoaderSettings:
    return settings_for(data, **{"ranks": RANKS, "tokens_per_step": 80, "capacity": 20, "epochs": 2} | changes)


def steps_of(loader: Loader) -> list[list[int]]:
    """Documents of each of a rank's steps."""
    steps: list[list[int]] = [[]]
    for batch in loader:
        steps[-1] += batch.document_ids.tolist()
        if batch.last_in_step:
            steps.append([])
    return steps[:-1]


def test_no_document_comes_twice_in_a_batch_or_an_epoch_and_epochs_differ(data: Path) -> None:
    settings = settings_of(data, seed=7)
    with LoaderProcess(settings) as process:
        runs = []
        for _ in range(2):
            loaders = [
                Loader(endpoint=process.endpoint, rank=rank, peer=peer, peers=READERS, timeout=SECONDS)
                for rank in range(RANKS)
                for peer in range(READERS)
            ]
            read = [steps_of(loader) for loader in loaders]
            for loader in loaders:
                loader.close()
            assert read[::READERS] == read[1::READERS]  # readers of a rank hold one replica: they see the same
            runs.append([a + b for a, b in zip(*read[::READERS], strict=True)])
    assert runs[0] == runs[1]
    batches = runs[0]
    assert [len(set(batch)) for batch in batches] == [8] * 16
    first, second = ([document for batch in half for document in batch] for half in (batches[:8], batches[8:]))
    assert sorted(first) == sorted(second) == list(range(DOCUMENTS))
    assert first != second
    assert first != sorted(first)


def test_a_seed_that_is_not_set_is_drawn_once_shared_and_logged(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    unset = settings_of(data, seed=None)
    with caplog.at_level(logging.INFO, logger="seqmesh.loader"), LoaderProcess(unset) as process:
        (line,) = [record.getMessage() for record in caplog.records if "seed" in record.getMessage()]
        seed = int(re.findall(r"seed is (\d+): drawn, since none was set", line)[0])
        seen = []
        for rank in range(RANKS):
            for asked in (None, unset, settings_of(data, seed=seed)):
                with Loader(asked, endpoint=process.endpoint, rank=rank, timeout=SECONDS) as loader:
                    assert loader.settings.seed == seed
                    assert loader.state_dict()["stream"]["seed"] == seed
                    seen.append(steps_of(loader))
        with pytest.raises(ValueError, match="serves other settings"):
            Loader(settings_of(data, seed=seed + 1), endpoint=process.endpoint, rank=0, timeout=SECONDS)
        process.restart()  # by the same seed
        with Loader(endpoint=process.endpoint, rank=0, timeout=SECONDS) as loader:
            assert steps_of(loader) == seen[0]
        assert len([record for record in caplog.records if "drawn" in record.getMessage()]) == 1
    batches = [[document for document, _, _ in step] for step in global_batches(Feed(settings_of(data, seed=seed)))]
    assert [sorted(a + b) for a, b in zip(seen[0], seen[-1], strict=True)] == [sorted(batch) for batch in batches]


def seed_of(ranks: Ranks, settings: LoaderSettings) -> tuple[int | None, list[list[int]]]:
    """As on machines of their own: each rank has a loader to itself."""
    with Loader(settings, rank=ranks.rank, mode="inline") as loader:
        return loader.settings.seed, steps_of(loader)


def test_ranks_on_several_machines_have_one_seed(data: Path) -> None:
    (first, ours), (second, theirs) = run_ranks(seed_of, RANKS, settings_of(data, seed=None))
    assert first == second
    assert [len(set(a) | set(b)) for a, b in zip(ours, theirs, strict=True)] == [8] * 16


def test_another_start_draws_another_seed_and_a_resumed_run_keeps_its_own(data: Path) -> None:
    unset = settings_of(data, seed=None)
    with Loader(unset, rank=0, mode="inline") as loader, Loader(unset, rank=0, mode="inline") as other:
        assert loader.settings.seed != other.settings.seed
        batches = iter(loader)
        while not next(batches).last_in_step:
            pass
        state = loader.state_dict()
        rest = steps_of(loader)
        other.load_state_dict(state)
        assert steps_of(other) == rest
        assert other.state_dict() == loader.state_dict()


def test_a_loader_process_that_is_ordered_without_a_seed_draws_one(data: Path, tmp_path: Path) -> None:
    order = Order(settings=settings_of(data, seed=None), endpoint=f"ipc://{tmp_path}/loader", owner=os.getpid())
    with server_process(order) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"
        with Loader(order.settings, endpoint=order.endpoint, rank=0, timeout=SECONDS) as loader:
            assert loader.settings.seed is not None
            assert f"seed is {loader.settings.seed}: drawn" in process.stderr.readline()
