"""Damaged messages on the way from the loader, and damaged shards: found out, and nobody gets other tokens."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from seqmesh.loader import client as client_module
from seqmesh.loader.client import Client
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, digests_inline, served_here, take
from tests.support import long_tail, make_set, settings_for

SMALL_CREDIT = 2000  # bytes: a few batches


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
    settings: LoaderSettings, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.3)
    stop, damaging, damaged = threading.Event(), f"ipc://{tmp_path}/damaging", list[int]()
    proxy = threading.Thread(target=lambda: damaged.append(damage_messages(damaging, endpoint, stop, seed=5, one_in=4)))
    proxy.start()
    try:
        client = Client(damaging, rank=0, credit=SMALL_CREDIT, timeout=SECONDS, transport=transport)  # type: ignore[arg-type]
        client.subscribe(Position(Feed(settings).start))
        assert take(client) == digests_inline(settings, 0)
        client.close()
    finally:
        stop.set()
        proxy.join()
    assert damaged[0] >= 20
