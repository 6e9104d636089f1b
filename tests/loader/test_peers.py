"""Peers, the processes of one rank: the same batches, gathered once, from one memory, whoever of them is slow or dies.

A loader in a thread of this process, so that its counters and slots can be looked into.
"""

import contextlib
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Delivery, Draft, Feed, Position
from seqmesh.loader.service import Service
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, RankProcess, digests_inline, served_here, take, wait_until
from tests.support import long_tail, make_set, settings_for, walk

LARGE = 1 << 20  # bytes of credit: for all batches at once
SMALL = 4096  # for two or three; a ring of one page


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), long_tail(200, 40))
    return settings_for(data, ranks=2, capacity=48).resolved()


@pytest.fixture(scope="module")
def start(settings: LoaderSettings) -> Position:
    return Position(Feed(settings).start)


@pytest.fixture(scope="module")
def every(settings: LoaderSettings) -> list[str]:
    return digests_inline(settings, 0)


@pytest.fixture
def service(settings: LoaderSettings, tmp_path: Path) -> Iterator[Service]:
    with served_here(settings, f"ipc://{tmp_path}/loader") as service:
        yield service


@pytest.fixture
def endpoint(service: Service) -> str:
    assert service.handover is not None
    return "ipc://" + service.handover.path.removesuffix(".rings")


@contextlib.contextmanager
def peers_at(
    endpoint: str, position: Position, credits: Sequence[int], *, rank: int = 0, timeout: float = SECONDS
) -> Iterator[list[Client]]:
    """As many peers as there are credits, at a position."""
    count = len(credits)
    clients = [
        Client(endpoint, rank=rank, peer=peer, peers=count, credit=credit, timeout=timeout, transport="shm")
        for peer, credit in enumerate(credits)
    ]
    try:
        for client in clients:
            client.subscribe(position)
        yield clients
    finally:
        for client in clients:
            client.close()


def slots_of(service: Service, rank: int = 0) -> list[Any]:
    return list(service._supply._rings[rank]._slots.values())


def walk_with_views(client: Client) -> list[str]:
    """Read to the end as a `for` loop does: each batch is in use while the next is waited for."""
    digests, delivery = [], client.next()
    while delivery is not None:
        digests.append(batch_digest(delivery.batch))
        delivery = client.next()
    return digests


def test_three_peers_get_the_same_batches_which_are_gathered_once(
    service: Service, endpoint: str, start: Position, every: list[str]
) -> None:
    with peers_at(endpoint, start, [LARGE] * 3) as clients:
        taken: list[list[str]] = [[], [], []]
        order = [peer for peer in range(3) for _ in every]
        random.Random(5).shuffle(order)
        for peer in order:
            taken[peer] += take(clients[peer], 1)
        assert taken == [every] * 3
        assert service.counters.read_batches == len(every)
        assert service.counters.ranks[0].sent == 3 * len(every)
        (name,) = {name for client in clients for name in client._rings}
        assert service._supply.find_memory(f"{name} x") is not None
        lines = re.findall(r"^\S+ (\S+) \S+ (\S+ \d+) +/memfd:seqmesh-ring", Path("/proc/self/maps").read_text(), re.M)
        assert sorted(protection for protection, _ in lines) == ["r--s"] * 3 + ["rw-s"]
        assert len({memory for _, memory in lines}) == 1
        for client in clients:
            client.give_back()
        wait_until(lambda: not slots_of(service))


def test_a_small_ring_is_enough_for_peers_that_go_side_by_side(
    service: Service, endpoint: str, start: Position, every: list[str]
) -> None:
    with peers_at(endpoint, start, [SMALL] * 3) as clients:
        for digest in every:
            assert [take(client, 1) for client in clients] == [[digest]] * 3
    # Rarely, a peer that was quick has the others' next one given up.
    assert service.counters.read_batches < 1.5 * len(every)


def test_peers_of_two_ranks_do_not_share(
    settings: LoaderSettings, endpoint: str, start: Position, every: list[str]
) -> None:
    with peers_at(endpoint, start, [SMALL] * 2) as ours, peers_at(endpoint, start, [SMALL] * 2, rank=1) as others:
        assert [take(client) for client in others] == [digests_inline(settings, 1)] * 2
        assert [take(client) for client in ours] == [every] * 2


@pytest.mark.parametrize("credits", [[LARGE, SMALL, 1], [1, LARGE, SMALL], [1, 1, 1]])
def test_peers_may_give_different_credit(
    service: Service, endpoint: str, start: Position, every: list[str], credits: list[int]
) -> None:
    with peers_at(endpoint, start, credits) as clients:
        taken: list[list[str]] = [[], [], []]
        for number in range(3 * len(every)):
            taken[number % 3] += take(clients[number % 3], 1)
        assert taken == [every] * 3
    wait_until(lambda: not slots_of(service))


@pytest.mark.parametrize("read", [take, walk_with_views], ids=["copies", "views"])
def test_a_late_peer_begins_where_it_wants_to(
    service: Service, endpoint: str, start: Position, every: list[str], read: Callable[[Client], list[str]]
) -> None:
    first, late = (Client(endpoint, rank=0, peer=n, peers=2, credit=SMALL, timeout=SECONDS) for n in range(2))
    first.subscribe(start)
    assert read(first) == every
    late.subscribe(start)
    assert read(late) == every
    first.close()
    late.close()
    wait_until(lambda: not slots_of(service))


def test_what_is_in_use_may_lie_in_the_way_of_a_large_batch(tmp_path: Path) -> None:
    """The credit allows for both, and the ring has room for both, but not in one piece."""
    data = make_set(tmp_path / "set", [440, 380, 800] * 10, shard_tokens=20_000)
    settings = settings_for(data, tokens_per_step=800, capacity=800, shuffle=False)
    every = digests_inline(settings, 0)
    with served_here(settings, f"ipc://{tmp_path}/loader") as service:
        start = Position(service.feed.start)
        with peers_at(f"ipc://{tmp_path}/loader", start, [16384], timeout=5) as (client,):
            assert walk_with_views(client) == every
        assert service.counters.ranks[0].sent == len(every)


def test_what_does_not_fit_in_beside_the_others_comes_at_once(
    settings: LoaderSettings, service: Service, endpoint: str, start: Position, every: list[str]
) -> None:
    """One peer has the ring full of batches that it does not read, and the other keeps all that it gets."""
    middle = [position for position, _ in walk(Feed(settings), 0)][19]
    with peers_at(endpoint, start, [4 * SMALL] * 2) as (_, client):
        wait_until(lambda: sum(slot.size for slot in slots_of(service)) > 3 * SMALL)
        begin = time.monotonic()
        client.subscribe(middle)
        kept = [client.next() for _ in range(6)]
        assert time.monotonic() - begin < 4  # not one for each heartbeat
    assert [batch_digest(each.batch) for each in kept if each] == every[20:26]


@pytest.mark.parametrize(
    ("fault", "keeps", "read"),
    [
        (signal.SIGKILL, True, walk_with_views),
        (signal.SIGKILL, False, take),
        (signal.SIGSTOP, True, walk_with_views),
        (signal.SIGSTOP, False, take),
    ],
    ids=["killed", "killed, copies", "stopped", "stopped, copies"],
)
def test_a_dead_or_stopped_peer_keeps_nobody_waiting(
    service: Service,
    endpoint: str,
    start: Position,
    every: list[str],
    fault: signal.Signals,
    keeps: bool,
    read: Callable[[Client], list[str]],
) -> None:
    with (
        RankProcess(endpoint, 0, start, peer=2, peers=3, credit=SMALL, keeps=keeps) as other,
        peers_at(endpoint, start, [SMALL] * 3) as clients,
    ):
        clients.pop().close()  # its place is the other process's
        assert other.take(1) == every[:1]
        other.process.send_signal(fault)
        taken = [read(client) for client in clients]
        assert taken == [every] * 2
        if fault == signal.SIGSTOP:
            assert slots_of(service)
            other.process.send_signal(signal.SIGCONT)
            if not keeps:
                assert other.take(len(every) - 1) == every[1:]
        other.process.kill()
        successor = Client(endpoint, rank=0, peer=2, peers=3, credit=SMALL, timeout=SECONDS)
        successor.subscribe(other.position)
        assert read(successor) == every[len(every) if fault == signal.SIGSTOP and not keeps else 1 :]
        successor.close()
    wait_until(lambda: not slots_of(service) and not service._readers and not service._left)


class Gate:
    """Keeps a loader busy with its next batch until it is opened."""

    def __init__(self, service: Service) -> None:
        self._busy, self._open, self._draft = threading.Event(), threading.Event(), service.feed.draft
        service.feed.draft = self._wait  # type: ignore[method-assign]  # it is a test's

    def _wait(self, rank: int, position: Position) -> Draft | None:
        self._busy.set()
        assert self._open.wait(SECONDS)
        return self._draft(rank, position)

    def wait_until_busy(self) -> None:
        assert self._busy.wait(SECONDS)

    def open(self) -> None:
        time.sleep(0.2)  # until what was sent meanwhile has come
        self._open.set()


def test_a_process_that_leaves_and_ends_at_once_is_buried_once(
    service: Service, endpoint: str, start: Position, every: list[str]
) -> None:
    """The loader, busy meanwhile, learns of its good-bye and of its end in the same moment."""
    # It is owed nothing when it leaves: one batch is all its credit.
    with RankProcess(endpoint, 1, start, credit=1) as leaving, peers_at(endpoint, start, [0]) as (client,):
        leaving.take(1)
        wait_until(lambda: any(reader.pidfd >= 0 for reader in service._readers.values()))
        gate = Gate(service)
        client._credit = SMALL
        client.subscribe(start)
        gate.wait_until_busy()
        assert leaving.process.stdin is not None
        leaving.process.stdin.close()
        assert leaving.process.wait(SECONDS) == 0
        gate.open()
        assert take(client) == every


def test_the_good_bye_of_one_who_is_sent_batches_is_heard(service: Service, endpoint: str, start: Position) -> None:
    """Its connection is found gone before: what it has let go of is free all the same, though its process lives."""
    client = Client(endpoint, rank=0, credit=1, timeout=SECONDS)
    client.subscribe(start)
    kept = client.next()
    assert kept is not None
    digest = batch_digest(kept.batch)
    gate = Gate(service)
    client._credit = LARGE
    client._hello()
    gate.wait_until_busy()
    client.close()
    gate.open()
    wait_until(lambda: not service._readers and len(slots_of(service)) == 1)
    assert batch_digest(kept.batch) == digest


def test_a_peer_is_awaited_though_the_one_before_it_leaves_after_it_came(
    service: Service, endpoint: str, start: Position
) -> None:
    before, after = (Client(endpoint, rank=0, peer=1, peers=2, credit=SMALL, timeout=SECONDS) for _ in range(2))
    before.subscribe(start)
    kept = before.next()
    after.subscribe(start)
    wait_until(lambda: len(service._left) == 1)
    assert kept is not None
    del kept
    before.close()
    wait_until(lambda: not service._left)
    assert service._supply._rings[0]._gone == set()
    after.close()
    wait_until(lambda: service._supply._rings[0]._gone == {1})


@pytest.mark.parametrize("keeps", [True, False])
def test_views_stay_when_a_client_comes_back_that_was_sent_away(
    endpoint: str, start: Position, every: list[str], keeps: bool
) -> None:
    """It has the ring already: that its process lives must still be known, also where it held nothing when it left."""
    client = Client(endpoint, rank=0, credit=2 * SMALL, timeout=SECONDS)
    kept, position = list[Delivery](), start
    for number in range(4):
        client.subscribe(position)
        delivery = client.next()
        assert delivery is not None
        position = delivery.next_position
        if keeps or number == 3:
            kept.append(delivery)
        del delivery
        if number < 3:
            with pytest.raises(LoaderError, match="wave is 99"):
                client.subscribe(Position(start.state, 99))
                client.next()
    client.close()
    with peers_at(endpoint, start, [2 * SMALL]) as (other,):
        assert take(other) == every
    assert [batch_digest(each.batch) for each in kept] == every[4 - len(kept) : 4]


def test_a_client_that_was_sent_away_gets_back_what_it_let_go_of(
    service: Service, endpoint: str, start: Position, every: list[str]
) -> None:
    client = Client(endpoint, rank=0, credit=SMALL, timeout=SECONDS)
    for _ in range(3):
        client.subscribe(start)
        delivery = client.next()
        with pytest.raises(LoaderError, match="wave is 99"):
            client.subscribe(Position(start.state, 99))
            client.next()
        del delivery
    client.subscribe(start)
    assert take(client) == every
    client.close()
    wait_until(lambda: not slots_of(service) and not service._left)
