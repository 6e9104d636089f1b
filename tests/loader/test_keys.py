"""Keys for links between machines: who has the right ones is served, anybody else is told that it is about keys."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqmesh.loader.client import Client
from seqmesh.loader.endpoint import check_endpoint, listening
from seqmesh.loader.errors import LoaderTimeoutError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.keys import check_keys, create_keys
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, digests_inline, free_port, served_here, take
from tests.support import make_set, settings_for

REFUSED_SECONDS = 2.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), [10] * 60)
    return settings_for(data, tokens_per_step=20, capacity=10, ranks=2).resolved()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "ours"
    create_keys(folder)
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "theirs"
    create_keys(folder)
    return folder


@pytest.fixture(scope="module")
def endpoint(settings: LoaderSettings, keys: Path) -> Iterator[str]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with served_here(settings, endpoint, keys=keys):
        yield endpoint


@pytest.fixture
def copied(keys: Path, tmp_path: Path) -> Path:
    """A folder of the same keys, to be spoilt."""
    return Path(shutil.copytree(keys, tmp_path / "copied"))


def test_a_new_folder_of_keys_is_for_its_user_alone(keys: Path) -> None:
    check_keys(keys)
    secrets = [file for file in keys.rglob("*") if file.suffix == ".key_secret"]
    assert [file.stat().st_mode & 0o777 for file in (keys, keys / "ranks", *secrets)] == [0o700] * 2 + [0o600] * 2
    assert sorted(file.name for file in keys.iterdir()) == [
        "loader.key",
        "loader.key_secret",
        "rank.key_secret",
        "ranks",
    ]


def test_no_folder_of_keys_is_overwritten(keys: Path) -> None:
    before = (keys / "loader.key_secret").read_bytes()
    with pytest.raises(FileExistsError, match=str(keys)):
        create_keys(keys)
    assert (keys / "loader.key_secret").read_bytes() == before


@pytest.mark.parametrize("file", ["loader.key", "loader.key_secret", "rank.key_secret"])
def test_keys_that_can_not_be_used_are_named(copied: Path, file: str) -> None:
    path = copied / file
    path.write_bytes(path.read_bytes().replace(b'key = "', b'key = "x', 1))
    with pytest.raises(ValueError, match=rf"{file} is damaged: its keys must have 40 characters"):
        check_keys(copied)
    path.write_text("nonsense")
    with pytest.raises(ValueError, match=rf"{file} is not a key: "):
        check_keys(copied)
    path.unlink()
    with pytest.raises(ValueError, match=rf"keys is '{copied}': has no {file}; make them with"):
        Client("tcp://127.0.0.1:1", rank=0, credit=1, timeout=1, keys=copied)


@pytest.mark.parametrize("file", ["loader.key_secret", "rank.key_secret"])
def test_secrets_that_others_can_read_are_refused(copied: Path, file: str) -> None:
    (copied / file).chmod(0o640)
    words = rf"{file} has mode 640: others can read it; use chmod 600"
    with pytest.raises(ValueError, match=words):
        check_keys(copied)
    with pytest.raises(ValueError, match=words), listening(f"tcp://127.0.0.1:{free_port()}", keys=str(copied)):
        pytest.fail("it listens")


def test_keys_allow_any_address(keys: Path) -> None:
    check_endpoint("tcp://0.0.0.0:5555", keys=str(keys))
    with pytest.raises(ValueError, match="any other tcp address needs keys"):
        check_endpoint("tcp://0.0.0.0:5555")


def spoilt(others: Path, copied: Path, what: str) -> tuple[Path | None, str]:
    """The folder that a rank uses by mistake, and what it is told."""
    if what == "no keys":
        return None, "it asks for keys, and this rank has none"
    if what == "other keys":
        return others, f"not the one in {others}/loader.key"
    name = {"other loader key": "loader.key", "other rank key": "rank.key_secret"}[what]
    shutil.copy(others / name, copied / name)
    told = {"loader.key": "not the one in {}/loader.key", "rank.key_secret": "it refused the key of this rank, {}/rank"}
    return copied, told[name].format(copied)


@pytest.mark.parametrize("what", ["no keys", "other keys", "other loader key", "other rank key"])
def test_a_rank_without_the_right_keys_is_told_and_the_other_served(
    settings: LoaderSettings, endpoint: str, keys: Path, others: Path, copied: Path, what: str
) -> None:
    served = Client(endpoint, rank=0, credit=500, timeout=SECONDS, keys=keys)
    served.subscribe(Position(Feed(settings).start))
    taken = take(served, 3)
    theirs, words = spoilt(others, copied, what)
    refused = Client(endpoint, rank=1, credit=500, timeout=REFUSED_SECONDS, keys=theirs)
    with pytest.raises(LoaderTimeoutError, match=rf"rank 1: no answer from the loader at {endpoint} .*{words}"):
        refused.welcome()
    refused.close()
    assert taken + take(served) == digests_inline(settings, 0)
    served.close()


def test_a_rank_with_keys_is_told_that_the_loader_has_none(settings: LoaderSettings, keys: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with served_here(settings, endpoint):
        client = Client(endpoint, rank=0, credit=500, timeout=REFUSED_SECONDS, keys=keys)
        with pytest.raises(LoaderTimeoutError, match="it has no keys"):
            client.welcome()
        client.close()


def test_nothing_is_left_of_the_guard(settings: LoaderSettings, keys: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def serve_once() -> None:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        with served_here(settings, endpoint, keys=keys):
            client = Client(endpoint, rank=0, credit=500, timeout=SECONDS, keys=keys)
            client.welcome()
            assert threading.active_count() > threads
            client.close()

    threads = threading.active_count()
    serve_once()  # what is made once and kept
    before = open_files()
    for _ in range(3):
        serve_once()
    assert (open_files(), threading.active_count()) == (before, threads)
