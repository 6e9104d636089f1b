"""A loader and ranks on two machines: network namespaces with a cable between them, which is cut, or slow."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from seqmesh.loader.client import transport_of
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.keys import create_keys
from seqmesh.loader.order import Order, ServeOptions
from seqmesh.loader.settings import LoaderSettings
from tests.serving import RankProcess, digests_inline, server_process
from tests.support import long_tail, make_set, settings_for

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # seen by nobody but the two
PORT = 7300
SMALL_CREDIT = 2000  # bytes: a few batches
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
