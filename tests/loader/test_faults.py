"""Lost messages, dead and stopped processes, peers that send what they should not: the stream goes on exactly."""

import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from seqmesh.loader import client as client_module
from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.order import Order
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.wire import Ack, Batch, End, Error, Heartbeat, Unknown, Welcome, encode
from tests.serving import (
    SECONDS,
    SILENCE_SECONDS,
    RankProcess,
    connection,
    digests_inline,
    is_running,
    say_hello,
    server_process,
    take,
    wait_for,
    wait_until,
)
from tests.support import long_tail, make_set, settings_for

SMALL_CREDIT = 2000  # bytes: a few batches


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), long_tail(200, 40)), ranks=2, capacity=48)


@pytest.fixture(scope="module")
def start(settings: LoaderSettings) -> Position:
    return Position(Feed(settings).start)


@pytest.fixture(scope="module")
def process(settings: LoaderSettings) -> Iterator[LoaderProcess]:
    with LoaderProcess(settings) as process:
        yield process


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", SILENCE_SECONDS)


def client_of(process: LoaderProcess, rank: int, *, credit: int = SMALL_CREDIT) -> Client:
    return Client(process.endpoint, rank=rank, credit=credit, timeout=SECONDS, alive=process.check)


def test_a_silent_rank_hears_that_the_loader_lives(process: LoaderProcess) -> None:
    with connection(process.endpoint) as socket:
        say_hello(socket, session=5)
        first, second = (wait_for(socket, Heartbeat) for _ in range(2))
        assert (first.session, first.sequence) == (5, 0)
        socket.send(b"nonsense")
        assert wait_for(socket, Error).session == 5
        say_hello(socket, session=6, credit=SMALL_CREDIT)
        beat = wait_for(socket, Heartbeat)
    assert beat.sequence >= 2  # batches that went before it
    assert beat.refused == second.refused + 1


def test_an_unknown_connection_is_told_to_say_hello(process: LoaderProcess) -> None:
    with connection(process.endpoint) as socket:
        socket.send_multipart(encode(Ack(session=3, sequence=0, held=[])))
        assert wait_for(socket, Unknown) == Unknown(session=3)
        say_hello(socket, session=4)
        wait_for(socket, Welcome)


def test_a_rank_at_its_end_is_told_again(settings: LoaderSettings, process: LoaderProcess, start: Position) -> None:
    client = client_of(process, 0, credit=1 << 20)
    client.subscribe(start)
    every = digests_inline(settings, 0)
    assert take(client) == every
    assert client.next() is None
    client.close()
    with connection(process.endpoint) as socket:
        say_hello(socket, credit=1 << 20)
        assert [wait_for(socket, End).sequence for _ in range(2)] == [len(every)] * 2


def lose_messages(client_end: str, loader_end: str, stop: threading.Event, *, seed: int, one_in: int) -> int:
    """Pass messages between one client and a loader, but for one in so many; how many were lost."""
    lost, random_numbers = 0, random.Random(seed)
    with zmq.Context() as context, context.socket(zmq.DEALER) as left, context.socket(zmq.DEALER) as right:
        for socket in (left, right):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        left.bind(client_end)
        right.connect(loader_end)
        while not stop.is_set():
            for source, destination in ((left, right), (right, left)):
                if source.poll(1):
                    frames = source.recv_multipart()
                    if random_numbers.randrange(one_in):
                        destination.send_multipart(frames)
                    else:
                        lost += 1
    return lost


def test_whatever_message_is_lost_every_batch_comes_once(
    settings: LoaderSettings,
    process: LoaderProcess,
    start: Position,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.3)  # also shorter than a heartbeat: needless hellos
    stop, endpoint, lost = threading.Event(), f"ipc://{tmp_path}/lossy", list[int]()
    proxy = threading.Thread(
        target=lambda: lost.append(lose_messages(endpoint, process.endpoint, stop, seed=3, one_in=12))
    )
    proxy.start()
    try:
        client = Client(endpoint, rank=0, credit=SMALL_CREDIT, timeout=SECONDS)
        client.subscribe(start)
        assert take(client) == digests_inline(settings, 0)
        client.close()
    finally:
        stop.set()
        proxy.join()
    assert lost[0] >= 3


@pytest.mark.usefixtures("impatient")
def test_a_loader_that_was_stopped_for_a_while_goes_on(
    settings: LoaderSettings, process: LoaderProcess, start: Position
) -> None:
    client = client_of(process, 0)
    client.subscribe(start)
    taken = take(client, 3)
    os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(4.0, os.kill, (process.pid, signal.SIGCONT))  # after two hellos more
    timer.start()
    try:
        assert taken + take(client) == digests_inline(settings, 0)
    finally:
        timer.join()
    client.close()


@pytest.mark.usefixtures("impatient")
def test_a_new_process_at_the_same_endpoint_goes_on(settings: LoaderSettings, start: Position) -> None:
    with LoaderProcess(settings) as process:
        clients = [client_of(process, rank) for rank in range(2)]
        for client in clients:
            client.subscribe(start)
        taken = [take(client, 3) for client in clients]
        before = process.pid
        process.restart()
        assert process.pid != before
        for rank, client in enumerate(clients):
            assert taken[rank] + take(client) == digests_inline(settings, rank)
            client.close()


def test_a_loader_with_other_settings_is_not_taken_for_the_one_before(
    settings: LoaderSettings, start: Position, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/loader"
    other = settings_for(Path(settings.data), ranks=2, capacity=40)
    client = Client(endpoint, rank=0, credit=SMALL_CREDIT, timeout=SECONDS)
    for serving in (settings.resolved(), other.resolved()):
        with server_process(Order(settings=serving, endpoint=endpoint, owner=os.getpid())):
            if serving.capacity == settings.capacity:
                client.subscribe(start)
                take(client, 1)
            else:
                with pytest.raises(LoaderError, match="has other settings or data than the one before it"):
                    take(client)
    client.close()


@pytest.mark.usefixtures("impatient")
def test_a_loader_that_dies_is_started_again_a_stated_number_of_times(
    settings: LoaderSettings, caplog: pytest.LogCaptureFixture
) -> None:
    taken = []
    with Loader(settings, rank=0, timeout=SECONDS, credit_bytes=SMALL_CREDIT, restarts=2) as loader:
        process = loader._process
        assert process is not None
        with pytest.raises(LoaderError, match="the loader process ended with exit code -9: "):
            for batch in loader:
                taken.append(batch_digest(batch))
                if len(taken) in (3, 8, 13):
                    killed = process.pid
                    os.kill(killed, signal.SIGKILL)
                    wait_until(lambda killed=killed: len(taken) == 13 or process.pid != killed)  # type: ignore[misc]
    assert len(taken) >= 13
    assert taken == digests_inline(settings, 0)[: len(taken)]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [words.rsplit(", ", 1)[1] for words in warnings] == ["1 restarts left", "0 restarts left"]


def test_data_that_is_refused_is_not_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = make_set(tmp_path / "set", [5] * 40)
    with Loader(settings_for(data, tokens_per_step=5), rank=0, timeout=SECONDS, credit_bytes=10) as loader:
        batches = iter(loader)
        next(batches)
        data.rename(tmp_path / "elsewhere")
        assert loader._process is not None
        os.kill(loader._process.pid, signal.SIGKILL)
        with pytest.raises(LoaderError, match=r"exit code 2: .*is not a finished shard set"):
            list(batches)
    assert len([record for record in caplog.records if "starting it again" in record.message]) == 1


def test_a_loader_that_was_told_to_end_is_not_started_again(settings: LoaderSettings) -> None:
    with LoaderProcess(settings, restarts=3) as process:
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(LoaderError, match="exit code 143"):
            wait_until(lambda: process.check() is not None)  # type: ignore[func-returns-value]  # it raises


def test_a_process_can_be_stopped_while_it_is_started_again(settings: LoaderSettings) -> None:
    process = LoaderProcess(settings, restarts=3)
    before = process.pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: process.pid != before)
    process.stop()
    process.stop()
    assert not is_running(process.pid)
    assert not process.log.parent.exists()


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_wedged_or_dead_rank_keeps_nobody_waiting(
    settings: LoaderSettings, process: LoaderProcess, start: Position, fault: signal.Signals
) -> None:
    every = digests_inline(settings, 1)
    with RankProcess(process.endpoint, 1, start, credit=SMALL_CREDIT) as rank:
        assert rank.take(2) == every[:2]
        rank.process.send_signal(fault)
        client = client_of(process, 0)
        client.subscribe(start)
        assert take(client) == digests_inline(settings, 0)
        client.close()
        if fault == signal.SIGSTOP:
            rank.process.send_signal(signal.SIGCONT)
            assert rank.take(3) == every[2:5]
        with RankProcess(process.endpoint, 1, rank.position) as successor:
            done = 2 if fault == signal.SIGKILL else 5
            assert successor.take(4) == every[done : done + 4]


def test_the_connection_of_a_dead_rank_is_forgotten(settings: LoaderSettings, start: Position) -> None:
    with LoaderProcess(settings) as process:
        with RankProcess(process.endpoint, 1, start, credit=SMALL_CREDIT) as rank:
            rank.take(1)
        wait_until(lambda: "rank 1 is gone" in process.log.read_text())


def test_a_rank_that_is_replaced_is_told(process: LoaderProcess, start: Position) -> None:
    first, second = client_of(process, 0), client_of(process, 0)
    first.subscribe(start)
    second.subscribe(start)
    with pytest.raises(LoaderError, match="rank 0: another process reads as this rank now"):
        take(first)
    take(second, 5)
    first.close()
    second.close()


def test_a_rank_that_sends_garbage_is_served_no_longer(
    settings: LoaderSettings, process: LoaderProcess, start: Position
) -> None:
    other = client_of(process, 1)
    other.subscribe(start)
    taken = take(other, 2)
    client = client_of(process, 0)
    client.subscribe(start)
    client._socket.send(b"\x80\x04.")
    with pytest.raises(LoaderError, match="rank 0: sent a message that was refused: not a message, or a damaged one"):
        take(client)
    client.close()
    assert taken + take(other) == digests_inline(settings, 1)
    other.close()


def test_leaving_a_dead_loader_does_not_hang(settings: LoaderSettings, start: Position) -> None:
    with LoaderProcess(settings) as process:
        client = client_of(process, 0)
        client.subscribe(start)
        take(client, 1)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(process.pid))
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()


def test_a_repeated_batch_is_dropped_and_a_missing_one_asked_for(start: Position, tmp_path: Path) -> None:
    """Played by hand: a loader that repeats itself, loses a batch, and loses a welcome."""
    client = Client(f"ipc://{tmp_path}/loader", rank=0, credit=1, timeout=SECONDS)
    client._position, client._session, client._welcomed, client._sequence = start, 7, True, 2
    state = start.state.to_dict()
    fields: dict[str, Any] = {"scalars": {}, "lengths": [], "after": state, "arena": "", "offset": 0, "checksum": 0}
    batch = Batch(session=7, sequence=1, **fields)
    assert not client._accept(batch)
    assert client._session == 7
    assert not client._accept(Heartbeat(session=7, sequence=3, refused=0))
    assert client._session == 8  # hello was said: batch 2 is missing
    assert not client._accept(batch.model_copy(update={"session": 8, "sequence": 0}))
    assert client._session == 9  # hello was said: no welcome came
    client.close()
