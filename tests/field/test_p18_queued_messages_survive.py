"""Messages that were queued for a receiver died with it, without an error anywhere."""

import os
import signal
import threading

import pytest

from seqmesh.loader import client as client_module
from seqmesh.loader.client import Client
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, SILENCE_SECONDS, RankProcess, digests_inline, take
from tests.support import make_set, settings_for

BATCHES = 20


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), [10] * 2 * BATCHES)
    return settings_for(data, tokens_per_step=20, capacity=10, ranks=2)


def test_a_receiver_killed_after_3_of_20_leaves_17_for_the_next(settings: LoaderSettings) -> None:
    start, every = Position(Feed(settings).start), digests_inline(settings, 0)
    assert len(set(every)) == BATCHES
    with LoaderProcess(settings) as process:
        with RankProcess(process.endpoint, 0, start) as first:  # with credit for all 20
            delivered = first.take(3)
            first.process.kill()
        with RankProcess(process.endpoint, 0, first.position) as second:
            delivered += second.take(BATCHES - 3)
    assert delivered == every


def test_a_loader_killed_while_two_ranks_read_loses_and_repeats_nothing(
    settings: LoaderSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", SILENCE_SECONDS)
    start, delivered = Position(Feed(settings).start), list[list[str]]([[], []])
    with LoaderProcess(settings, restarts=2) as process:

        def read(rank: int) -> None:
            client = Client(process.endpoint, rank=rank, credit=1000, timeout=SECONDS, alive=process.check)
            client.subscribe(start)
            for _ in range(BATCHES):
                delivered[rank] += take(client, 1)
                if rank == 0 and len(delivered[0]) in (5, 12):
                    os.kill(process.pid, signal.SIGKILL)
            client.close()

        readers = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(2)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(2 * SECONDS)
    assert delivered == [digests_inline(settings, rank) for rank in range(2)]


def test_a_rank_is_served_again_though_the_owner_of_the_loader_does_not_ask_for_anything(
    settings: LoaderSettings,
) -> None:
    """The owner may be in a collective that waits for the very rank that waits for the loader."""
    with LoaderProcess(settings, restarts=1) as process:
        with RankProcess(process.endpoint, 1, Position(Feed(settings).start), credit=500) as rank:
            delivered = rank.take(4)
            killed = process.pid
            os.kill(killed, signal.SIGKILL)
            delivered += rank.take(BATCHES - 4)
        assert process.pid != killed
    assert delivered == digests_inline(settings, 1)
