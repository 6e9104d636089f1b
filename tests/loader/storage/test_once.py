import errno
import threading
from pathlib import Path

import pytest

from seqmesh.loader.errors import LoaderTimeoutError
from seqmesh.loader.storage.once import built_once

SECONDS = 20.0


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path) -> None:
    path.write_bytes(b"new")


def test_what_is_there_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"old")
    assert built_once(tmp_path / "index", lambda _: pytest.fail("was built")) == tmp_path / "index"
    assert names(tmp_path) == ["index"]


def test_threads_build_once(tmp_path: Path) -> None:
    built, together = list[Path](), threading.Barrier(8)

    def build(path: Path) -> None:
        built.append(path)
        path.write_bytes(b"new")

    def reader() -> None:
        together.wait(SECONDS)
        assert built_once(tmp_path / "index", build, SECONDS).read_bytes() == b"new"

    threads = [threading.Thread(target=reader) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(built) == 1
    assert names(tmp_path) == ["index", "index.lock"]


def test_a_build_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        built_once(tmp_path / "index", fail)
    assert names(tmp_path) == ["index.lock"]
    built_once(tmp_path / "index", write)
    assert (tmp_path / "index").read_bytes() == b"new"


def test_a_builder_that_never_ends_is_named(tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()

    def build(path: Path) -> None:
        begun.set()
        assert end.wait(SECONDS)
        path.write_bytes(b"new")

    builder = threading.Thread(target=built_once, args=(tmp_path / "index", build))
    builder.start()
    assert begun.wait(SECONDS)
    with pytest.raises(LoaderTimeoutError, match=r"index: another process has been building it for over 0.1 s"):
        built_once(tmp_path / "index", build, timeout=0.1)
    end.set()
    builder.join(SECONDS)
    assert (tmp_path / "index").read_bytes() == b"new"


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert built_once(tmp_path / "index", write).read_bytes() == b"new"
    assert [name for name in names(tmp_path) if not name.endswith(".lock")] == ["index"]
