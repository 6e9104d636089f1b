"""Queue limits counted messages, on each side of the connection, beside what the kernel holds: memory ran out."""

import os
import socket as network
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqmesh.loader.client import Client
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.order import Order
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.wire import Ack, Batch, Heartbeat, decode, encode
from tests.serving import SECONDS, batch_bytes, connection, resident_bytes, say_hello, server_process, take, wait_for
from tests.support import make_set, settings_for

MIB = 1 << 20
LIMIT = 8 * MIB
BATCHES = 1000
GROWTH = 30 * MIB  # far below the 1,000 MiB that pass


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    """Batches of one document each, of just under 1 MiB, without end."""
    tokens = (MIB - 1024) // 12  # three fields of 4 bytes a token, and what describes one document
    settings = settings_of(make_set(tmp_path_factory.mktemp("set"), [tokens] * 8, shard_tokens=4 * tokens), tokens)
    assert MIB - 2000 < batch_bytes(settings) <= MIB
    return settings


def settings_of(data: Path, tokens: int) -> LoaderSettings:
    return settings_for(data, tokens_per_step=2 * tokens, capacity=tokens, ranks=2, epochs=None).resolved()


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "ipc":
        yield f"ipc://{tmp_path}/loader"
        return
    with network.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield f"tcp://127.0.0.1:{port}"


def test_the_loader_stops_after_eight_batches_and_holds_no_more_memory(settings: LoaderSettings, endpoint: str) -> None:
    order = Order(settings=settings, endpoint=endpoint, owner=os.getpid())
    with server_process(order) as server, connection(endpoint) as stalled:
        say_hello(stalled, rank=1, credit=LIMIT)
        assert wait_for(stalled, Heartbeat).sequence == 8  # sent, whatever of it has arrived
        client = Client(endpoint, rank=0, credit=LIMIT, timeout=SECONDS)
        client.subscribe(Position(Feed(settings).start))
        take(client, 50)
        before = resident_bytes(server.pid)
        assert len(take(client, BATCHES)) == BATCHES
        growth = resident_bytes(server.pid) - before
        print(f"{endpoint.partition(':')[0]}: {growth / MIB:.1f} MiB more after {BATCHES} batches of 1 MiB")
        assert growth < GROWTH
        client.close()
        assert wait_for(stalled, Heartbeat).sequence == 8


def test_credit_comes_back_with_each_ack(settings: LoaderSettings, endpoint: str) -> None:
    order = Order(settings=settings, endpoint=endpoint, owner=os.getpid())
    with server_process(order), connection(endpoint) as socket:
        say_hello(socket, credit=LIMIT)
        for sequence in range(20):
            while not isinstance(message := decode(socket.recv_multipart()[0]), Batch):
                pass
            assert message.sequence == sequence
            socket.send_multipart(encode(Ack(session=1, sequence=sequence + 1, held=[])))
        assert wait_for(socket, Heartbeat).sequence == 28
