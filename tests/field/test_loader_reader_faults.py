"""The process that reads raised, was killed or stalled, and ranks waited for ever: each gets an error, or goes on."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from seqmesh.loader import client as client_module
from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderError, LoaderTimeoutError, ShardError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.order import FAILED, Order
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, digests_inline, server_process, take, wait_until
from tests.support import long_tail, make_set, settings_for

RANKS = 2
TIMEOUT = 2.0  # the deadline of a rank
GRACE = 5.0  # for a busy machine
CREDIT = 2000  # bytes: a few batches

# Fails at the so many-th batch that is read.
FAULTY = """
from itertools import count
from seqmesh.loader import errors, feed
reads, write = count(), feed.write
def fail(*arguments):
    if next(reads) == {batches}:
        raise {error}
    write(*arguments)
feed.write = fail
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), long_tail(200, 40))
    return settings_for(data, ranks=RANKS, capacity=48).resolved()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.7)


def read_all(settings: LoaderSettings, endpoint: str, during: Callable[[int], None], timeout: float) -> list[object]:
    """What each rank comes to: all its digests, or an error with the seconds since its last batch. during: called with
    the batches that rank 0 has read."""
    start = Position(Feed(settings).start)

    def read(rank: int) -> object:
        client, digests = Client(endpoint, rank=rank, credit=CREDIT, timeout=timeout), list[str]()
        client.subscribe(start)
        last = time.monotonic()
        try:
            while more := take(client, 1):
                digests += more
                last = time.monotonic()
                if rank == 0:
                    during(len(digests))
        except LoaderError as error:
            return error, time.monotonic() - last
        finally:
            client.close()
        return digests

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(read, range(RANKS)))


@contextmanager
def faulty(settings: LoaderSettings, endpoint: str, code: str) -> Iterator["subprocess.Popen[str]"]:
    """A loader that serves, and will fail."""
    with server_process(Order(settings=settings, endpoint=endpoint, owner=os.getpid()), code=code) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield server


def check_errors(results: Sequence[object], kind: type[LoaderError], words: str = "") -> None:
    for result in results:
        assert isinstance(result, tuple), "this rank has read to the end"
        error, seconds = result
        assert isinstance(error, kind)
        assert words in str(error)
        assert seconds < TIMEOUT + GRACE


def never(_: int) -> None:
    pass


def at(count: int, action: Callable[[], None]) -> Callable[[int], None]:
    return lambda read: action() if read == count else None


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    yield f"ipc://{tmp_path}/s"


def test_an_error_that_nobody_foresaw_reaches_every_rank_in_time(settings: LoaderSettings, endpoint: str) -> None:
    code = FAULTY.format(batches=9, error="RuntimeError('the reader is broken')")
    with faulty(settings, endpoint, code) as server:
        check_errors(read_all(settings, endpoint, never, TIMEOUT), LoaderTimeoutError)
        _, log = server.communicate(timeout=SECONDS)
    assert server.returncode == FAILED
    assert "the reader is broken" in log


def test_a_damaged_shard_reaches_the_rank_that_needs_it_at_once(settings: LoaderSettings, endpoint: str) -> None:
    code = FAULTY.format(batches=9, error="errors.ShardError('shard 3 is damaged')")
    with faulty(settings, endpoint, code):
        results = read_all(settings, endpoint, never, TIMEOUT)
    failed = [result for result in results if isinstance(result, tuple)]
    assert len(failed) == 1
    check_errors(failed, LoaderError, "shard 3 is damaged")
    assert not isinstance(failed[0][0], ShardError | LoaderTimeoutError)  # as the loader's word, without a wait
    (rank,) = [rank for rank, result in enumerate(results) if result is not failed[0]]
    assert results[rank] == digests_inline(settings, rank)


def test_a_reader_that_is_killed_reaches_every_rank_in_time(settings: LoaderSettings) -> None:
    with LoaderProcess(settings) as process:
        kill = at(5, lambda: os.kill(process.pid, signal.SIGKILL))
        check_errors(read_all(settings, process.endpoint, kill, TIMEOUT), LoaderTimeoutError)
        with pytest.raises(LoaderError, match="exit code -9"):  # what the owner knows
            process.check()


def test_a_reader_that_is_killed_is_started_again_and_the_streams_go_on(settings: LoaderSettings) -> None:
    with LoaderProcess(settings, restarts=1) as process:
        killed = process.pid
        kill = at(5, lambda: os.kill(killed, signal.SIGKILL))
        results = read_all(settings, process.endpoint, kill, SECONDS)
        wait_until(lambda: process.pid != killed)
    assert results == [digests_inline(settings, rank) for rank in range(RANKS)]


@pytest.mark.parametrize("seconds", [1.2, None])
def test_a_reader_that_stalls_reaches_every_rank_in_time_or_goes_on(
    settings: LoaderSettings, seconds: float | None
) -> None:
    with LoaderProcess(settings) as process:

        def stall() -> None:
            os.kill(process.pid, signal.SIGSTOP)
            if seconds is not None:
                threading.Timer(seconds, os.kill, (process.pid, signal.SIGCONT)).start()

        results = read_all(settings, process.endpoint, at(5, stall), TIMEOUT if seconds is None else SECONDS)
        os.kill(process.pid, signal.SIGCONT)
    if seconds is None:
        check_errors(results, LoaderTimeoutError)
    else:
        assert results == [digests_inline(settings, rank) for rank in range(RANKS)]
