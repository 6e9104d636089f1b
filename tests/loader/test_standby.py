"""A second loader process that stands by: it takes over within a fraction of a second, and the streams go on."""

import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.server import serve
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, digests_inline, free_port, is_running, take, wait_until
from tests.support import long_tail, make_set, settings_for

KILLS = 3
TAKEOVER_SECONDS = 3.0  # on a busy machine; the median is printed


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), long_tail(200, 40)), ranks=2, capacity=48)


@pytest.fixture(scope="module")
def process(settings: LoaderSettings) -> Iterator[LoaderProcess]:
    with LoaderProcess(settings, standby=True, restarts=KILLS + 1) as process:
        yield process


@pytest.fixture
def clients(settings: LoaderSettings, process: LoaderProcess) -> Iterator[list[Client]]:
    """Both ranks at the start, with one batch under way at most: the second from now on must be asked for."""
    clients = [Client(process.endpoint, rank=rank, credit=1, timeout=SECONDS, alive=process.check) for rank in range(2)]
    for client in clients:
        client.subscribe(Position(Feed(settings).start))
    yield clients
    for client in clients:
        client.close()


def wait_for_both(process: LoaderProcess) -> list[int]:
    """Wait until one process serves and another stands by; their process ids."""
    wait_until(lambda: len(process._children) == 2 and not any(c.words_of_its_end() for c in process._children))
    with process._lock:  # held until a new one is ready
        return [child.pid for child in process._children]


def test_streams_go_on_within_a_second_of_every_kill(
    settings: LoaderSettings, process: LoaderProcess, clients: list[Client]
) -> None:
    taken, seconds = [take(client, 3) for client in clients], []
    for _ in range(KILLS):
        serving, standing_by = wait_for_both(process)
        os.kill(serving, signal.SIGKILL)
        begin = time.monotonic()
        for rank, client in enumerate(clients):
            taken[rank] += take(client, 2)
        seconds.append(time.monotonic() - begin)
        wait_until(lambda standing_by=standing_by: process.pid == standing_by)  # type: ignore[misc]
    print(f"takeover: {statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s")
    assert max(seconds) < TAKEOVER_SECONDS
    for rank, client in enumerate(clients):
        assert taken[rank] + take(client) == digests_inline(settings, rank)


def test_a_loader_that_is_stopped_is_not_dead(
    settings: LoaderSettings, process: LoaderProcess, clients: list[Client]
) -> None:
    """Nobody can tell it from one that plans for long: the other must not serve beside it."""
    serving, standing_by = wait_for_both(process)
    taken = take(clients[0], 3)
    os.kill(serving, signal.SIGSTOP)
    goes_on = threading.Timer(0.5, os.kill, (serving, signal.SIGCONT))
    goes_on.start()
    try:
        assert taken + take(clients[0]) == digests_inline(settings, 0)
    finally:
        goes_on.join()
    assert wait_for_both(process) == [serving, standing_by]


def test_the_place_of_a_dead_standby_is_filled(process: LoaderProcess) -> None:
    serving, standing_by = wait_for_both(process)
    os.kill(standing_by, signal.SIGKILL)
    wait_until(lambda: standing_by not in [child.pid for child in process._children])
    after = wait_for_both(process)
    assert after[0] == serving
    assert after[1] != standing_by


def test_a_loader_that_was_told_to_end_is_followed_but_not_replaced(settings: LoaderSettings) -> None:
    with Loader(settings, rank=0, timeout=SECONDS, credit_bytes=1, standby=True) as loader:
        process = loader._process
        assert process is not None
        serving, standing_by = wait_for_both(process)
        batches = iter(loader)
        taken = [batch_digest(next(batches))]
        os.kill(serving, signal.SIGTERM)
        taken += [batch_digest(batch) for batch in batches]
        wait_until(lambda: [child.pid for child in process._children] == [standing_by])
    assert taken == digests_inline(settings, 0)


def test_both_end_together_and_leave_nothing(
    settings: LoaderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with LoaderProcess(settings, standby=True) as process:
        pids = wait_for_both(process)
        assert all(is_running(pid) for pid in pids)
        assert len(list(tmp_path.iterdir())) == 1
    assert not any(is_running(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == []


def test_a_standby_where_it_sees_no_other_is_refused(settings: LoaderSettings) -> None:
    with pytest.raises(ValueError, match=r"a standby needs ipc://PATH"):
        serve(
            settings,
            f"tcp://127.0.0.1:{free_port()}",
            ready=lambda: pytest.fail("it serves"),
            options=ServeOptions(standby=True),
        )
