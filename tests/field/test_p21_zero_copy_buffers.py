"""Buffers that were handed out without copying were overwritten while they were in use: wrong data, exit code 0.

Every batch is compared with itself: its digest when it came, and its digest when it is let go of. Slots are poisoned
when they are free again, so that one that is free too soon is noticed also where nothing is written into it.
"""

import ctypes
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqmesh.loader import client as client_module
from seqmesh.loader.arena import POISON
from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import CreditError
from seqmesh.loader.feed import Delivery, Feed, Position
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.tensors import TorchBatch
from tests.serving import SECONDS, SILENCE_SECONDS, batch_bytes, digests_inline, is_running, served_here, wait_until
from tests.support import make_set, settings_for

TOKENS = 4096
KEEPING_SECONDS = 0.005
POISONED = ServeOptions(poison=True)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    """201 batches of about 50 kB in three epochs."""
    data = make_set(tmp_path_factory.mktemp("set"), [TOKENS] * 67, shard_tokens=20 * TOKENS)
    return settings_for(data, tokens_per_step=TOKENS, capacity=TOKENS, epochs=3).resolved()


@pytest.fixture(scope="module")
def every(settings: LoaderSettings) -> list[str]:
    return digests_inline(settings, 0)


@pytest.fixture(scope="module")
def two_slots(settings: LoaderSettings) -> int:
    return 2 * batch_bytes(settings)


@pytest.fixture(scope="module")
def process(settings: LoaderSettings) -> Iterator[LoaderProcess]:
    with LoaderProcess(settings, options=POISONED) as process:
        yield process


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_a_batch_is_the_same_at_the_end_of_its_keeping(
    process: LoaderProcess, every: list[str], two_slots: int, views: bool
) -> None:
    """Two slots: one batch is in use while the next comes."""
    assert len(every) >= 200
    came, went = [], []
    with Loader(endpoint=process.endpoint, rank=0, views=views, credit_bytes=two_slots, timeout=SECONDS) as loader:
        before: TorchBatch | None = None
        for batch in loader:
            came.append(batch_digest(batch))
            if before is not None:
                went.append(batch_digest(before))
            time.sleep(KEEPING_SECONDS)
            before = batch
            del batch
        assert before is not None
        went.append(batch_digest(before))
    assert came == every
    assert went == every


def test_some_batches_are_kept_for_long_while_others_come_and_go(
    process: LoaderProcess, every: list[str], two_slots: int
) -> None:
    """Of four slots at most three are in use when a batch is asked for, let go of in any order."""
    kept, came, went, chance = dict[int, TorchBatch](), list[str](), dict[int, str](), random.Random(1)
    with Loader(endpoint=process.endpoint, rank=0, views=True, credit_bytes=2 * two_slots, timeout=SECONDS) as loader:
        for number, batch in enumerate(loader):
            came.append(batch_digest(batch))
            kept[number] = batch
            del batch
            while len(kept) > chance.randint(0, 3):
                which = chance.choice(sorted(kept))
                went[which] = batch_digest(kept.pop(which))
        went |= {which: batch_digest(batch) for which, batch in kept.items()}
    assert came == every
    assert [went[number] for number in range(len(every))] == every


def test_who_stores_views_is_told_at_the_deadline_and_all_he_holds_is_whole(
    process: LoaderProcess, every: list[str], two_slots: int
) -> None:
    stored: list[TorchBatch] = []
    with Loader(endpoint=process.endpoint, rank=0, views=True, credit_bytes=two_slots, timeout=1.5) as loader:
        for _ in range(2):  # it is told again
            with pytest.raises(
                CreditError, match=f"rank 0: no batch within 1.5 s, 2 are still in use and may hold all of {two_slots} "
            ):
                stored.extend(loader)
            assert [batch_digest(batch) for batch in stored] == every[:2]
        stored.pop(0)
        stored.append(next(iter(loader)))  # a slot is free again
    assert [batch_digest(batch) for batch in stored] == every[1:3]


def test_who_stores_copies_gets_them_all(process: LoaderProcess, every: list[str], two_slots: int) -> None:
    with Loader(endpoint=process.endpoint, rank=0, credit_bytes=two_slots, timeout=SECONDS) as loader:
        assert [batch_digest(batch) for batch in list(loader)] == every


def first_of(client: Client, settings: LoaderSettings) -> Delivery:
    client.subscribe(Position(Feed(settings).start))
    delivery = client.next()
    assert delivery is not None
    return delivery


def test_a_slot_that_is_let_go_of_is_poisoned(settings: LoaderSettings, two_slots: int, tmp_path: Path) -> None:
    """The tests above can fail: whoever looks at memory after its time sees what it is filled with."""
    with served_here(settings, f"ipc://{tmp_path}/loader"):
        client = Client(f"ipc://{tmp_path}/loader", rank=0, credit=two_slots, timeout=SECONDS)
        delivery: Delivery | None = first_of(client, settings)
        places = set[int]()
        while delivery is not None:
            address, last = delivery.batch.input_ids.ctypes.data, delivery.batch.input_ids.tobytes()
            places.add(address)
            delivery = client.next()
        assert len(places) == 2
        assert ctypes.string_at(address, len(last)) == last
        client.give_back()
        wait_until(lambda: ctypes.string_at(address, len(last)) == bytes([POISON]) * len(last))
        client.close()


def test_views_outlive_the_loader_its_restart_and_the_end_of_its_process(
    settings: LoaderSettings, every: list[str], two_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", SILENCE_SECONDS)
    with Loader(
        settings, rank=0, views=True, credit_bytes=two_slots, timeout=SECONDS, options=POISONED, restarts=1
    ) as loader:
        batches, process = iter(loader), loader._process
        assert process is not None
        kept = [next(batches)]
        process.restart()  # with a ring of its own
        kept.append(next(batches))
        killed = process.pid
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: process.pid != killed and is_running(process.pid))
        kept.append(next(batches))
        for number in range(3, 20):
            assert batch_digest(next(batches)) == every[number]
    assert not is_running(process.pid)
    assert [batch_digest(batch) for batch in kept] == every[:3]


def test_views_of_an_earlier_session_are_not_overwritten(
    settings: LoaderSettings, every: list[str], two_slots: int, tmp_path: Path
) -> None:
    """A client that says hello again still holds what it held, also after it has closed."""
    with served_here(settings, f"ipc://{tmp_path}/loader") as service:
        client = Client(f"ipc://{tmp_path}/loader", rank=0, credit=2 * two_slots, timeout=SECONDS)
        kept = [first_of(client, settings)]
        for number in range(1, 30):
            client._hello()
            delivery = client.next()
            assert delivery is not None
            if number < 3:
                kept.append(delivery)
            else:
                assert batch_digest(delivery.batch) == every[number]
            del delivery
            assert [batch_digest(each.batch) for each in kept] == every[: len(kept)]
        client.close()
        other = Client(f"ipc://{tmp_path}/loader", rank=0, credit=2 * two_slots, timeout=SECONDS)
        assert batch_digest(first_of(other, settings).batch) == every[0]
        for number in range(1, 50):
            delivery = other.next()
            assert delivery is not None
            assert batch_digest(delivery.batch) == every[number]
            del delivery
        other.close()
        assert [batch_digest(each.batch) for each in kept] == every[:3]
        wait_until(lambda: len(service._supply.ring(0)._slots) == 3)
