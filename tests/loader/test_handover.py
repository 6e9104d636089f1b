"""Real Unix sockets: a ring's memory reaches the processes that are to have it, and nobody keeps anybody waiting."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqmesh.loader.arena import Arena, Mapping
from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderTimeoutError
from seqmesh.loader.feed import Position
from seqmesh.loader.handover import MAX_PENDING, Handover, fetch, handing_over, handover_path
from seqmesh.loader.ready import first_readable
from tests.serving import SECONDS, digests_inline, served_here, take, wait_until
from tests.support import make_set, settings_for

SIZE = 1 << 16
NOBODY = 65534


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/loader"


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(SIZE)
    arena.block(0, 5)[:] = list(b"hello")
    yield arena
    arena.close()


@contextlib.contextmanager
def serving(handover: Handover, arena: Arena) -> Iterator[list[tuple[str, int]]]:
    """Hand over in a thread, as the loader's loop does; what was handed over to whom."""
    done, stop = list[tuple[str, int]](), os.eventfd(0)

    def find(name: str) -> tuple[int, int] | None:
        return (arena.descriptor, arena.size) if name == arena.name else None

    def loop() -> None:
        while (ready := first_readable(*handover.descriptors, stop)) != stop:
            assert ready is not None
            if served := handover.serve(ready, find):
                done.append(served)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield done
    finally:
        os.eventfd_write(stop, 1)
        thread.join()
        os.close(stop)
        for _, process in done:
            os.close(process)


@pytest.fixture
def handed(endpoint: str, arena: Arena) -> Iterator[tuple[Handover, list[tuple[str, int]]]]:
    with handing_over(endpoint) as handover:
        assert handover is not None
        with serving(handover, arena) as done:
            yield handover, done


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    connection.settimeout(SECONDS)
    return connection


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_descriptor_that_arrives_is_of_the_same_memory(
    handed: tuple[Handover, list[tuple[str, int]]], arena: Arena
) -> None:
    found = fetch(handed[0].path, arena.name, SECONDS)
    assert found is not None
    assert os.fstat(found[0]).st_ino == os.fstat(arena.descriptor).st_ino
    assert not os.get_inheritable(found[0])
    mapping = Mapping(*found)
    assert mapping.size == SIZE
    assert bytes(mapping.block(0, 5, lambda: None)) == b"hello"


def test_a_name_that_is_unknown_gets_nothing(handed: tuple[Handover, list[tuple[str, int]]]) -> None:
    for name in ("another", "", "x" * 1000, "é" * 40):
        assert fetch(handed[0].path, name, SECONDS) is None
    assert handed[1] == []


def test_nobody_there_is_nothing(endpoint: str, tmp_path: Path) -> None:
    assert fetch(handover_path(endpoint), "x", 1) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "dead"))
    assert fetch(str(tmp_path / "dead"), "x", 1) is None


def test_a_loader_that_does_not_answer_is_a_timeout(endpoint: str, arena: Arena) -> None:
    begin = time.monotonic()
    with handing_over(endpoint) as handover, pytest.raises(LoaderTimeoutError, match=r"no answer .* within 0.2 s"):
        assert handover is not None
        fetch(handover.path, arena.name, 0.2)
    assert time.monotonic() - begin < 2


def test_who_says_nothing_or_leaves_early_keeps_nobody_waiting(
    handed: tuple[Handover, list[tuple[str, int]]], arena: Arena
) -> None:
    handover, done = handed
    silent = [connect(handover.path) for _ in range(3)]
    connect(handover.path).close()
    with connect(handover.path) as hasty:
        hasty.send(b"no such name")
    found = fetch(handover.path, arena.name, SECONDS)
    assert found is not None
    os.close(found[0])
    wait_until(lambda: len(done) == 1)
    wait_until(lambda: len(handover.descriptors) == 1 + len(silent))
    for connection in silent:
        connection.close()
    wait_until(lambda: len(handover.descriptors) == 1)


def test_who_leaves_before_the_answer_leaves_no_descriptor(endpoint: str, arena: Arena) -> None:
    with handing_over(endpoint) as handover:
        assert handover is not None
        before = open_descriptors()
        with connect(handover.path) as hasty:
            assert handover.serve(handover.listener.fileno(), lambda _: None) is None
            hasty.send(arena.name.encode())
        (pending,) = handover.descriptors[1:]
        assert handover.serve(pending, lambda _: (arena.descriptor, arena.size)) is None
        assert open_descriptors() == before


def test_many_that_say_nothing_keep_nobody_out(handed: tuple[Handover, list[tuple[str, int]]], arena: Arena) -> None:
    handover, _ = handed
    silent = [connect(handover.path) for _ in range(MAX_PENDING + 1)]
    assert silent[0].recv(1) == b""
    assert len(handover.descriptors) == 1 + MAX_PENDING
    found = fetch(handover.path, arena.name, SECONDS)
    assert found is not None
    os.close(found[0])
    for connection in silent:
        connection.close()


FETCH = """
import os, sys
from seqmesh.loader.handover import fetch
folder, path, name, user = sys.argv[1:]
os.chdir(folder)
os.setuid(int(user))
try:
    print(fetch(path, name, 10), flush=True)
except Exception as error:
    print(repr(error), flush=True)
sys.stdin.read()
"""
# For one that does not care whose loader it is.
FORCE = """
import socket
def fetch(path, name, timeout):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout)
        connection.connect(path)
        try:
            connection.send(name.encode())
            return socket.recv_fds(connection, 64, 1)[:2]
        except ConnectionError:
            return b"", []
"""


@contextlib.contextmanager
def fetching(
    path: str, name: str, *, user: int = os.getuid(), code: str = FETCH
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Another process that fetches; what it got."""
    folder, file = os.path.split(path)
    command, pipe = [sys.executable, "-c", code, folder, file, name, str(user)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_the_end_of_the_process_that_fetched_is_seen(
    handed: tuple[Handover, list[tuple[str, int]]], arena: Arena
) -> None:
    handover, done = handed
    with fetching(handover.path, arena.name) as (process, got):
        assert got.endswith(f", {SIZE})\n")
        wait_until(lambda: len(done) == 1)
        ((name, pidfd),) = done
        assert name == arena.name
        information = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        assert f"\nPid:\t{process.pid}\n" in information
        assert select.select([pidfd], [], [], 0)[0] == []
        process.kill()
        assert select.select([pidfd], [], [], SECONDS)[0] == [pidfd]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_gets_nothing(
    handed: tuple[Handover, list[tuple[str, int]]], arena: Arena, tmp_path: Path
) -> None:
    handover, done = handed
    tmp_path.chmod(0o711)
    os.chmod(handover.path, 0o666)
    with fetching(handover.path, arena.name, user=NOBODY) as (_, got):
        assert "loader.rings belongs to a process of another user" in got
    forced = FETCH.replace("from seqmesh.loader.handover import fetch", FORCE)
    with fetching(handover.path, arena.name, user=NOBODY, code=forced) as (_, got):
        assert got == "(b'', [])\n"
    with fetching(handover.path, arena.name, code=forced) as (_, got):
        assert got.startswith(f"(b'{SIZE}', [")
    wait_until(lambda: len(done) == 1)


def test_the_socket_is_private_and_gone_at_the_end(endpoint: str) -> None:
    with handing_over(endpoint) as handover:
        assert handover is not None
        assert os.stat(handover.path).st_mode & 0o777 == 0o600
        connection = connect(handover.path)
        handover.serve(handover.listener.fileno(), lambda _: None)
    assert not os.path.exists(handover.path)
    assert connection.recv(1) == b""
    connection.close()


def test_the_socket_of_a_loader_that_was_killed_is_replaced(endpoint: str, arena: Arena) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(handover_path(endpoint))
    with handing_over(endpoint) as handover:
        assert handover is not None
        with serving(handover, arena):
            found = fetch(handover.path, arena.name, SECONDS)
    assert found is not None
    os.close(found[0])


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "inproc://x"])
def test_at_an_address_that_others_can_reach_nothing_is_handed_over(endpoint: str) -> None:
    with handing_over(endpoint) as handover:
        assert handover is None


def test_a_loader_goes_on_though_many_connect_and_leave_at_once(tmp_path: Path) -> None:
    settings = settings_for(make_set(tmp_path / "set", [10] * 20), tokens_per_step=10, capacity=10)
    endpoint = f"ipc://{tmp_path}/l"
    with served_here(settings, endpoint) as service, contextlib.ExitStack() as open_ones:
        for number in range(4 * MAX_PENDING):
            connection = open_ones.enter_context(connect(handover_path(endpoint)))
            if number % 3:
                connection.close()
        client = Client(endpoint, rank=0, credit=1 << 16, timeout=SECONDS)
        client.subscribe(Position(service.feed.start))
        assert take(client) == digests_inline(settings, 0)
        client.close()
