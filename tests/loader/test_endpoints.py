"""A loader whose address changes: the rank is told, and goes on at the other at its exact next batch."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from seqmesh.loader import client as client_module
from seqmesh.loader.address import Address
from seqmesh.loader.client import Client
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.order import Order
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, digests_inline, free_port, served_here, server_process, take, wait_until
from tests.support import long_tail, make_set, settings_for

CREDIT = 2000  # bytes: a few batches


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), long_tail(200, 40)), ranks=2, capacity=48).resolved()


@pytest.fixture(scope="module")
def every(settings: LoaderSettings) -> list[str]:
    return digests_inline(settings, 1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to wait long for nothing."""
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr("seqmesh.loader.address.PAUSE_SECONDS", 0.05)


class Says:
    """A resolver: says the first of `words` for ever, or raises it; the test changes it."""

    def __init__(self, word: object) -> None:
        self.word = word
        self.asked = 0

    def __call__(self) -> str:
        self.asked += 1
        if isinstance(self.word, Exception):
            raise self.word
        return self.word  # type: ignore[return-value]  # some tests say what is no address


def rank(says: Callable[[], str], *, timeout: float = SECONDS) -> Client:
    return Client(says, rank=1, credit=CREDIT, timeout=timeout)


def subscribed(says: Callable[[], str], settings: LoaderSettings, *, timeout: float = SECONDS) -> Client:
    client = rank(says, timeout=timeout)
    client.subscribe(Position(Feed(settings).start))
    return client


def tcp() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def addresses(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    yield tuple(tcp() if kind == "tcp" else f"ipc://{tmp_path}/{n}" for n, kind in enumerate(request.param))  # type: ignore[misc]  # two


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("addresses", [("tcp", "tcp"), ("ipc", "tcp"), ("tcp", "ipc"), ("ipc", "ipc")], indirect=True)
def test_a_rank_goes_on_at_another_address(
    settings: LoaderSettings, every: list[str], addresses: tuple[str, str]
) -> None:
    says = Says(addresses[0])
    with served_here(settings, addresses[1]):
        with served_here(settings, addresses[0]):
            client = subscribed(says, settings)
            taken = take(client, 7)
            assert client.endpoint == addresses[0]
            says.word = addresses[1]
        taken += take(client)
        assert client.endpoint == addresses[1]
        client.close()
    assert taken == every


def test_a_rank_goes_on_where_the_loader_is_after_its_process_was_killed(
    settings: LoaderSettings, every: list[str]
) -> None:
    here, there = tcp(), tcp()
    says = Says(here)
    with server_process(Order(settings=settings, endpoint=here, owner=os.getpid())) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        client = subscribed(says, settings)
        taken = take(client, 7)
        process.kill()
        process.wait()
        with served_here(settings, there):
            says.word = there
            taken += take(client)
            client.close()
    assert taken == every


@pytest.mark.usefixtures("quick")
def test_a_loader_that_says_nothing_is_left_for_another(
    settings: LoaderSettings, every: list[str], tmp_path: Path
) -> None:
    here, there = f"ipc://{tmp_path}/loader", tcp()
    says = Says(here)
    with server_process(Order(settings=settings, endpoint=here, owner=os.getpid())) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        client = subscribed(says, settings)
        taken = take(client, 7)
        process.send_signal(signal.SIGSTOP)
        with served_here(settings, there):
            says.word = there
            taken += take(client)
            assert client.endpoint == there
            client.close()
    assert taken == every


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("nonsense", [OSError("no file yet"), None, "nonsense", "tcp://nowhere", "ipc://" + "x" * 200])
def test_no_answer_or_a_useless_one_means_to_wait_for_the_next(
    settings: LoaderSettings, every: list[str], nonsense: object
) -> None:
    here, there = tcp(), tcp()
    says = Says(nonsense)

    def answer_after(count: int, endpoint: str) -> threading.Thread:
        def wait() -> None:
            wait_until(lambda: says.asked >= count)
            says.word = endpoint

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    with served_here(settings, there):
        with served_here(settings, here):
            thread = answer_after(3, here)
            client = subscribed(says, settings)
            taken = take(client, 7)
            thread.join()
            says.word = nonsense
        thread = answer_after(says.asked + 3, there)
        taken += take(client)
        client.close()
        thread.join()
    assert taken == every


@pytest.mark.usefixtures("quick")
def test_a_loader_that_is_back_where_it_was_is_read_on_whatever_is_said(
    settings: LoaderSettings, every: list[str]
) -> None:
    here = tcp()
    says = Says(here)
    with served_here(settings, here):
        client = subscribed(says, settings)
        taken = take(client, 7)
        says.word = ValueError("nobody knows")
    with served_here(settings, here):
        taken += take(client)
        client.close()
    assert taken == every


@pytest.mark.usefixtures("quick")
def test_who_never_answers_does_not_keep_a_rank_beyond_its_timeout(settings: LoaderSettings) -> None:
    silent = threading.Event()
    client = rank(lambda: str(silent.wait(SECONDS)), timeout=1.0)
    begin = time.monotonic()
    with pytest.raises(LoaderTimeoutError, match="asked for its address has said nothing for"):
        client.subscribe(Position(Feed(settings).start))
    client.close()
    assert time.monotonic() - begin < 3
    silent.set()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("word", "message"), [(KeyError("node7"), "KeyError: 'node7'"), (None, "must be a str")])
def test_a_rank_that_gives_up_says_why_it_knew_no_address(settings: LoaderSettings, word: object, message: str) -> None:
    client = rank(Says(word), timeout=1.0)
    with pytest.raises(LoaderTimeoutError, match=message):
        client.subscribe(Position(Feed(settings).start))
    client.close()


def test_shared_memory_that_was_asked_for_is_not_replaced_by_frames(settings: LoaderSettings) -> None:
    here = tcp()
    with served_here(settings, here):
        client = Client(Says(here), rank=1, credit=CREDIT, timeout=1.0, transport="shm")
        with pytest.raises(LoaderTimeoutError, match="transport is 'shm'"):
            client.subscribe(Position(Feed(settings).start))
        client.close()


@pytest.mark.usefixtures("quick")
def test_a_loader_elsewhere_with_other_data_is_refused(settings: LoaderSettings, tmp_path: Path) -> None:
    other = replace(settings, data=str(make_set(tmp_path, long_tail(200, 40, seed=1))))
    here, there = tcp(), tcp()
    says = Says(here)
    with served_here(other, there):
        with served_here(settings, here):
            client = subscribed(says, settings)
            take(client, 7)
            says.word = there
        with pytest.raises(LoaderError, match=f"at {there} has other settings or data than the one before"):
            take(client)
        client.close()


def test_a_loader_takes_a_callable(settings: LoaderSettings, every: list[str]) -> None:
    here = tcp()
    with served_here(settings, here), Loader(settings, endpoint=lambda: here, rank=1) as loader:
        assert len(list(loader)) == len(every)


def test_questions_are_never_asked_twice_at_a_time() -> None:
    open_question = threading.Event()
    asked: list[int] = []

    def answer() -> str:
        asked.append(1)
        assert open_question.wait(SECONDS)
        return "ipc://x"

    address = Address(answer)
    for _ in range(3):
        address.ask()
    assert address.answer is None
    open_question.set()
    wait_until(lambda: address.answer == "ipc://x")
    address.ask()  # a moment later
    assert len(asked) == 1
