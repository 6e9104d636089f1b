"""Damaged messages on the way from the loader, and damaged shards: found out, and nobody gets other tokens."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from seqmesh.loader import client as client_module
from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.shards import ShardSet
from tests.serving import SECONDS, digests_inline, served_here, take
from tests.support import long_tail, make_set, settings_for, walk

SMALL_CREDIT = 2000  # bytes: a few batches
TOKENS = 10  # of each document of a set that is to be damaged
DOCUMENTS = 80


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), long_tail(400, 40)), ranks=2, capacity=48).resolved()


@pytest.fixture(scope="module")
def endpoint(settings: LoaderSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    endpoint = f"ipc://{tmp_path_factory.mktemp('loader')}/loader"
    with served_here(settings, endpoint):
        yield endpoint


def damage_messages(client_end: str, loader_end: str, stop: threading.Event, *, seed: int, one_in: int) -> int:
    """Pass messages between one client and a loader, but flip a bit of one in so many of the loader's; how many."""
    damaged, random_numbers = 0, random.Random(seed)
    with zmq.Context() as context, context.socket(zmq.DEALER) as near, context.socket(zmq.DEALER) as far:
        poller = zmq.Poller()
        for socket in (near, far):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            poller.register(socket, zmq.POLLIN)
        near.bind(client_end)
        far.connect(loader_end)
        while not stop.is_set():
            for source, _ in poller.poll(10):
                frames = source.recv_multipart()
                if source is far and not random_numbers.randrange(one_in):
                    flip_a_bit(frames, random_numbers)
                    damaged += 1
                (near if source is far else far).send_multipart(frames)
    return damaged


def flip_a_bit(frames: list[bytes], random_numbers: random.Random) -> None:
    number = random_numbers.randrange(len(frames))
    frame = bytearray(frames[number])
    frame[random_numbers.randrange(len(frame))] ^= 1 << random_numbers.randrange(8)
    frames[number] = bytes(frame)


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_whatever_bit_is_flipped_every_batch_comes_once_and_intact(
    settings: LoaderSettings, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Any
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.3)
    stop, damaging, damaged = threading.Event(), f"ipc://{tmp_path}/damaging", list[int]()
    proxy = threading.Thread(target=lambda: damaged.append(damage_messages(damaging, endpoint, stop, seed=5, one_in=4)))
    proxy.start()
    try:
        client = Client(damaging, rank=0, credit=SMALL_CREDIT, timeout=SECONDS, transport=transport)
        client.subscribe(Position(Feed(settings).start))
        assert take(client) == digests_inline(settings, 0)
        client.close()
    finally:
        stop.set()
        proxy.join()
    assert damaged[0] >= 20


@pytest.fixture
def damageable(tmp_path: Path) -> LoaderSettings:
    """Settings over a set of their own, one document to a batch."""
    data = make_set(tmp_path / "set", [TOKENS] * DOCUMENTS, shard_tokens=200)
    return settings_for(data, tokens_per_step=2 * TOKENS, capacity=TOKENS, ranks=2).resolved()


def overwrite(path: Path, before: bytes, after: bytes) -> None:
    """Change bytes of a file in place, where somebody may have mapped it."""
    content = path.read_bytes()
    assert content.count(before) == 1
    with path.open("r+b") as file:
        file.seek(content.index(before))
        file.write(after)


def damage_offsets(shards: ShardSet, document: int) -> str:
    row = sum(shards.file_of(other) == shards.file_of(document) for other in range(document))
    offsets = np.arange(row, row + 2) * TOKENS
    overwrite(Path(shards.file_of(document)), offsets.tobytes(), np.array([offsets[0], 10**12]).tobytes())
    return f"the offsets of document {document} contradict"


def damage_ids(shards: ShardSet, document: int) -> str:
    ids = shards.tokens(document).copy()
    spoilt = ids.copy()
    spoilt[3] = shards.vocab_size
    overwrite(Path(shards.file_of(document)), ids.tobytes(), spoilt.tobytes())
    return f"document {document} "


@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize("damage", [damage_offsets, damage_ids])
def test_a_document_that_is_damaged_under_way_is_named_to_who_needs_it(
    damageable: LoaderSettings, tmp_path: Path, damage: Callable[[ShardSet, int], str], transport: Any
) -> None:
    feed, endpoint = Feed(damageable), f"ipc://{tmp_path}/loader"
    every = [digests_inline(damageable, rank) for rank in range(2)]
    document = int([batch for _, batch in walk(feed, 0)][25].document_ids[0])
    with served_here(damageable, endpoint):
        clients = [Client(endpoint, rank=n, credit=1, timeout=SECONDS, transport=transport) for n in range(2)]
        for client in clients:
            client.subscribe(Position(feed.start))
        taken = [take(client, 5) for client in clients]
        words = damage(feed.shards, document)
        with pytest.raises(LoaderError, match=rf"rank 0: .*{feed.shards.file_of(document)}: .*{words}"):
            while True:
                taken[0] += take(clients[0], 1)
        assert taken[0] == every[0][:25]
        assert taken[1] + take(clients[1]) == every[1]
        for client in clients:
            client.close()


def truncate(_: LoaderProcess, shards: Sequence[Path]) -> None:
    """The loader has them mapped, and gets a bus error."""
    for shard in shards:
        os.truncate(shard, 0)


def remove(process: LoaderProcess, shards: Sequence[Path]) -> None:
    for shard in shards:
        shard.unlink()
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("damage", "words"), [(truncate, "has 0 bytes, the manifest says"), (remove, "is missing")])
def test_a_shard_that_is_gone_at_the_restart_is_named_to_the_owner(
    damageable: LoaderSettings, damage: Callable[[LoaderProcess, Sequence[Path]], None], words: str
) -> None:
    start, shards = Position(Feed(damageable).start), sorted(Path(damageable.data).glob("shard-*"))
    with LoaderProcess(damageable, restarts=5) as process:
        owner = Client(process.endpoint, rank=0, credit=1, timeout=SECONDS, alive=process.check)
        other = Client(process.endpoint, rank=1, credit=1, timeout=1)
        for client in (owner, other):
            client.subscribe(start)
            take(client, 2)
        damage(process, shards)
        with pytest.raises(LoaderError, match=rf"exit code 2: .*{shards[0].name}: {words}"):
            take(owner)
        with pytest.raises(LoaderTimeoutError, match="rank 1: no answer from the loader"):
            take(other)
        for client in (owner, other):
            client.close()
