"""A document that did not fit was held in memory between two packs, and was lost when the run was resumed there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.client import Client
from seqmesh.loader.embedded import Loader
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.wire import Batch, End, decode
from tests.serving import SECONDS
from tests.support import make_set, settings_for

LENGTHS = [3, 3, 3, 2]
CREDIT = 1 << 20  # for all the packs at once


@pytest.fixture(scope="module", params=["kept", 0, 1], ids=lambda p: f"order {p}")
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), LENGTHS)
    order = {"shuffle": False} if request.param == "kept" else {"seed": request.param}
    return settings_for(data, capacity=5, tokens_per_step=5, **order)


@pytest.fixture(scope="module")
def endpoint(settings: LoaderSettings) -> Iterator[str]:
    with LoaderProcess(settings) as process:
        yield process.endpoint


def documents(loader: Loader, count: int | None = None) -> list[list[int]]:
    """Document ids of each of the next packs, by default of all that are left."""
    packs: list[list[int]] = []
    while count is None or len(packs) < count:
        if (batch := next(iter(loader), None)) is None:
            break
        packs.append(batch.document_ids.tolist())
    return packs


def read_ahead(loader: Loader) -> int:
    """How many packs lie in the rank's queue, undelivered, once the word that no more come lies there, too."""
    client = loader._source
    assert isinstance(client, Client)
    packs = 0
    while client._socket.poll(int(SECONDS * 1000)):
        message = decode(client._socket.recv_multipart()[0])
        if isinstance(message, End):
            return packs
        packs += isinstance(message, Batch)
    raise AssertionError("the end did not come")


def state_after(endpoint: str, delivered: int, packs: int) -> dict[str, Any]:
    """The state of a rank that was given so many of the packs, and that had read all others ahead."""
    with Loader(endpoint=endpoint, rank=0, timeout=SECONDS, credit_bytes=CREDIT) as loader:
        assert len(documents(loader, delivered)) == delivered
        state = loader.state_dict()
        if delivered:  # before the first is asked for, nothing is sent
            assert read_ahead(loader) == packs - delivered
        assert loader.state_dict() == state
    read_back: dict[str, Any] = json.loads(json.dumps(state))
    return read_back


def test_what_was_read_ahead_and_not_delivered_comes_after_the_resume(settings: LoaderSettings, endpoint: str) -> None:
    with Loader(settings, rank=0, mode="inline") as loader:
        packs = documents(loader)
    assert sorted(document for pack in packs for document in pack) == [0, 1, 2, 3]
    if not settings.shuffle:
        assert packs == [[0], [1], [2, 3]]
    for delivered in range(len(packs) + 1):
        state = state_after(endpoint, delivered, len(packs))
        for resumed in (Loader(settings, rank=0, mode="inline"), Loader(endpoint=endpoint, rank=0)):
            with resumed:
                resumed.load_state_dict(state)
                assert documents(resumed) == packs[delivered:]


def test_going_back_drops_what_was_read_ahead(endpoint: str) -> None:
    with Loader(endpoint=endpoint, rank=0, timeout=SECONDS, credit_bytes=CREDIT) as loader:
        first = documents(loader, 1)
        state = loader.state_dict()
        rest = documents(loader)
        loader.load_state_dict(state)
        again = documents(loader, 1)
        loader.load_state_dict(state)
        assert documents(loader) == rest
        assert again == rest[:1]
    assert sorted(document for pack in first + rest for document in pack) == [0, 1, 2, 3]


def test_a_save_and_a_resume_after_every_pack(settings: LoaderSettings, tmp_path: Path) -> None:
    packs, file = [], tmp_path / "state"
    while True:
        with Loader(settings, rank=0, mode="inline") as loader:
            if file.exists():
                loader.load_state_dict(json.loads(file.read_text()))
            if not (pack := documents(loader, 1)):
                break
            packs += pack
            file.write_text(json.dumps(loader.state_dict()))
    with Loader(settings, rank=0, mode="inline") as loader:
        assert packs == documents(loader)
