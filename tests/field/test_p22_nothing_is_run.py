"""A control channel that unpickled what it received ran whatever anybody sent to it."""

import os
import pickle
import random
import socket as unix
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from seqmesh.loader.client import Client
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.server import serve
from seqmesh.loader.service import MAX_REFUSALS_LOGGED
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.wire import PROTOCOL, Error, Heartbeat, seal
from tests.serving import SECONDS, connection, digests_inline, hello, say_hello, take, wait_for, wait_until
from tests.support import make_set, settings_for


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), [10] * 60), tokens_per_step=20, capacity=10, ranks=2)


@pytest.fixture(scope="module")
def process(settings: LoaderSettings) -> Iterator[LoaderProcess]:
    with LoaderProcess(settings) as process:
        yield process


class Mark:
    """Its pickle creates a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


def packed_hello(**changes: Any) -> bytes:
    fields = {"v": PROTOCOL, "type": "hello"} | hello().model_dump()
    return bytes(msgpack.packb(fields | changes))


def attacks(marker: Path) -> dict[str, bytes]:
    return {
        "pickle": pickle.dumps(Mark(marker)),
        "sealed pickle": seal(pickle.dumps(Mark(marker))),
        "truncated map": seal(packed_hello()[:-4]),
        "map of 4 GiB": seal(b"\xdf\xff\xff\xff\xff"),
        "string of 4 GiB": seal(b"\x81\xa1v\xdb\xff\xff\xff\xff"),
        "future version": seal(packed_hello(v=PROTOCOL + 1)),
        "random": random.Random(7).randbytes(500),
    }


def refused(process: LoaderProcess) -> int:
    """The loader's counter, as its heartbeats tell it."""
    with connection(process.endpoint) as socket:
        say_hello(socket, rank=1)
        beat: Heartbeat = wait_for(socket, Heartbeat)
    return beat.refused


def test_what_is_sent_is_counted_and_never_run(
    settings: LoaderSettings, process: LoaderProcess, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    payloads = attacks(marker)
    pickle.loads(payloads["pickle"])  # it would do what it is feared to do
    marker.rmdir()
    client = Client(process.endpoint, rank=0, credit=500, timeout=SECONDS)
    client.subscribe(Position(Feed(settings).start))
    taken = take(client, 2)
    before = refused(process)
    with connection(process.endpoint) as stranger, connection(process.endpoint) as reader:
        for session, payload in enumerate(payloads.values()):
            stranger.send(payload)
            say_hello(reader, rank=1, session=session)
            reader.send(payload)
            error: Error = wait_for(reader, Error)  # a rank that was served is told, and served no longer
            assert (error.session, "refused" in error.message) == (session, True)
        assert not stranger.poll(100)
    assert refused(process) == before + 2 * len(payloads)
    assert not marker.exists()
    assert taken + take(client) == digests_inline(settings, 0)
    client.close()


def test_bytes_that_are_not_even_zeromq_keep_nobody_waiting(settings: LoaderSettings, process: LoaderProcess) -> None:
    with unix.socket(unix.AF_UNIX) as raw, unix.socket(unix.AF_UNIX) as silent:
        for socket in (raw, silent):
            socket.connect(process.endpoint.removeprefix("ipc://"))
        raw.sendall(random.Random(8).randbytes(100))
        client = Client(process.endpoint, rank=0, credit=500, timeout=SECONDS)
        client.subscribe(Position(Feed(settings).start))
        assert take(client) == digests_inline(settings, 0)
        client.close()


def test_a_frame_over_the_limit_ends_the_connection(settings: LoaderSettings, process: LoaderProcess) -> None:
    with connection(process.endpoint) as socket:
        say_hello(socket, rank=1, credit=100)
        wait_for(socket, Heartbeat)
        socket.send(b"x" * 100_000)
        wait_until(lambda: "rank 1 is gone" in process.log.read_text())
    client = Client(process.endpoint, rank=1, credit=500, timeout=SECONDS)
    client.subscribe(Position(Feed(settings).start))
    assert take(client) == digests_inline(settings, 1)
    client.close()


def test_a_flood_neither_starves_a_rank_nor_fills_the_log(settings: LoaderSettings, process: LoaderProcess) -> None:
    before = refused(process)
    with connection(process.endpoint) as flood:
        for _ in range(5000):
            flood.send(b"\x00")
        client = Client(process.endpoint, rank=0, credit=500, timeout=SECONDS)
        client.subscribe(Position(Feed(settings).start))
        assert take(client) == digests_inline(settings, 0)
        client.close()
        wait_until(lambda: refused(process) == before + 5000)
    assert process.log.read_text().count("refused a message") <= MAX_REFUSALS_LOGGED


def test_a_state_that_is_not_one_is_refused_in_words(process: LoaderProcess) -> None:
    with connection(process.endpoint) as socket:
        say_hello(socket, credit=1, state={"__class__": 1})
        assert "stream state has version None" in wait_for(socket, Error).message


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://10.0.0.1:5555", "tcp://[::]:5555", "tcp://eth0:5555"]
)
def test_an_address_that_others_could_reach_is_refused(settings: LoaderSettings, endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"must be ipc://PATH or a loopback address"):
        serve(settings, endpoint, ready=lambda: pytest.fail("it serves"))
