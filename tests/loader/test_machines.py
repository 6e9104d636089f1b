"""A loader and ranks on two machines: network namespaces with a cable between them, which is cut, or slow."""

import contextlib
import os
import random
import select
import socket as network
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from seqmesh.loader.client import Client, transport_of
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.keys import create_keys
from seqmesh.loader.order import Order, ServeOptions
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, RankProcess, digests_inline, free_port, served_here, server_process, take
from tests.support import long_tail, make_set, settings_for

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # seen by nobody but the two
PORT = 7300
SMALL_CREDIT = 2000  # bytes: a few batches
CUTS = 8  # of connections at a random byte
DEAD_SECONDS = 2  # in place of the default, not to wait long
CODE = f"from seqmesh.loader import endpoint\nendpoint.IDLE_SECONDS, endpoint.DEAD_SECONDS = 1, {DEAD_SECONDS}"


@dataclass(frozen=True, slots=True)
class Cable:
    """Two network namespaces, by name, and the device in each that leads to the other."""

    machines: tuple[str, str]
    devices: tuple[str, str]

    def on(self, machine: int, *command: str) -> None:
        subprocess.run(
            ["ip", "netns", "exec", self.machines[machine], *command], check=True, capture_output=True, text=True
        )

    def prefix(self, machine: int) -> list[str]:
        return ["ip", "netns", "exec", self.machines[machine]]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    name = f"sm{os.getpid()}"
    machines, devices = (f"{name}a", f"{name}b"), (f"{name}x", f"{name}y")
    cable = Cable(machines, devices)
    try:
        try:
            for machine in machines:
                ip("netns", "add", machine)
            near, far = (("name", device, "netns", machine) for device, machine in zip(devices, machines, strict=True))
            ip("link", "add", *near, "type", "veth", "peer", *far)
            for number in range(2):
                cable.on(number, "ip", "address", "add", f"{ADDRESSES[number]}/24", "dev", devices[number])
                cable.on(number, "ip", "link", "set", devices[number], "up")
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root, `ip` and network namespaces: {getattr(error, 'stderr', error)}")
        yield cable
    finally:
        for machine in machines:  # their devices go with them
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "delete", machine], capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    create_keys(folder)
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), long_tail(400, 40))
    return settings_for(data, ranks=2, capacity=48).resolved()


@contextlib.contextmanager
def serving(cable: Cable, settings: LoaderSettings, keys: Path) -> Iterator[str]:
    """The endpoint of a loader on the first machine."""
    endpoint = f"tcp://{ADDRESSES[0]}:{PORT}"
    order = Order(settings=settings, endpoint=endpoint, owner=os.getpid(), options=ServeOptions(keys=str(keys)))
    with server_process(order, code=CODE, prefix=cable.prefix(0)) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield endpoint


def rank_of(cable: Cable, endpoint: str, rank: int, settings: LoaderSettings, keys: Path, credit: int) -> RankProcess:
    """A rank on the second machine."""
    start = Position(Feed(settings).start)
    return RankProcess(endpoint, rank, start, credit=credit, keys=keys, prefix=cable.prefix(1), code=CODE)


def test_a_cable_that_is_cut_for_a_while_costs_no_batch(cable: Cable, settings: LoaderSettings, keys: Path) -> None:
    every = [digests_inline(settings, rank) for rank in range(2)]
    with serving(cable, settings, keys) as endpoint, contextlib.ExitStack() as stack:
        assert transport_of(endpoint, "auto") == "zmq"
        ranks = [stack.enter_context(rank_of(cable, endpoint, n, settings, keys, SMALL_CREDIT)) for n in range(2)]
        taken = [rank.take(10) for rank in ranks]
        ip("-n", cable.machines[0], "link", "set", cable.devices[0], "down")
        mend = threading.Timer(DEAD_SECONDS + 1.0, ip, ("-n", cable.machines[0], "link", "set", cable.devices[0], "up"))
        mend.start()
        try:
            for n, rank in enumerate(ranks):
                taken[n] += rank.take(len(every[n]) - 10)
        finally:
            mend.join()
    assert taken == every


def test_a_batch_may_take_longer_than_a_dead_cable_is_waited_for(cable: Cable, tmp_path: Path, keys: Path) -> None:
    tokens = 30_000
    settings = settings_for(make_set(tmp_path, [tokens] * 2), tokens_per_step=tokens, capacity=tokens).resolved()
    with serving(cable, settings, keys) as endpoint:
        try:
            limit = ("rate", "1mbit", "burst", "32kb", "latency", "200ms")
            cable.on(0, "tc", "qdisc", "add", "dev", cable.devices[0], "root", "tbf", *limit)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs `tc` and the kernel's token bucket filter: {getattr(error, 'stderr', error)}")
        with rank_of(cable, endpoint, 0, settings, keys, 1) as rank:
            assert rank.take(1) == digests_inline(settings, 0)[:1]


class CuttingProxy:
    """Passes bytes between connections to `port` and those to a loader, and cuts the first few at a random byte."""

    def __init__(self, loader_port: int, *, seed: int) -> None:
        self._loader_port = loader_port
        self._random = random.Random(seed)
        self._listener = network.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(network.SHUT_RDWR)  # ends the wait for the next connection
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with (
                near,
                network.create_connection(("127.0.0.1", self._loader_port)) as far,
                contextlib.suppress(ConnectionError),  # one side cut it first
            ):
                self._pass(near, far, self._random.randrange(100, 6000) if self.cuts < CUTS else None)

    def _pass(self, near: network.socket, far: network.socket, left: int | None) -> None:
        """Pass bytes until so many are done, or one side is."""
        while True:
            for source in select.select([near, far], [], [])[0]:
                data = source.recv(4096 if left is None else min(left, 4096))
                if not data:
                    return
                (far if source is near else near).sendall(data)
                left = None if left is None else left - len(data)
                if left == 0:
                    self.cuts += 1
                    return


def test_a_connection_that_is_cut_at_any_byte_costs_no_batch(settings: LoaderSettings, keys: Path) -> None:
    port = free_port()
    with served_here(settings, f"tcp://127.0.0.1:{port}", keys=keys), CuttingProxy(port, seed=4) as proxy:
        client = Client(f"tcp://127.0.0.1:{proxy.port}", rank=0, credit=SMALL_CREDIT, timeout=SECONDS, keys=keys)
        client.subscribe(Position(Feed(settings).start))
        assert take(client) == digests_inline(settings, 0)
        client.close()
    assert proxy.cuts == CUTS
