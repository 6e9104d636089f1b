"""Data sets at URLs: what fsspec's drivers give, and what they do where storages fail."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

from seqmesh.loader.errors import RemoteError
from seqmesh.loader.files import checksum
from seqmesh.loader.storage import location as module
from seqmesh.loader.storage.location import Location
from seqmesh.loader.storage.retry import Patience, without_password
from tests.storage import BUCKET, STUCK_SECONDS, http_server, link_to, s3_server, s3_settings
from tests.support import killed_after

QUICK = Patience(seconds=20, tries=4, pause=0.01)
DATA = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8).tobytes()
FILES = {"a.arrow": DATA, "b.bin": b"b", "empty": b"", "sub/c.txt": b"ccc"}
HASH = xxhash.xxh3_128_hexdigest(DATA)

Fault = Callable[[bytes], bytes]


class Faulty(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Files in memory, behind a connection: each request for bytes meets the next of `faults`, if any is left."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[list[Fault]] = []
    asked: ClassVar[list[tuple[int, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("faulty://").split("@")[-1].strip("/")

    def cat_file(self, path: str, start: int = 0, end: int = 0, **_: Any) -> bytes:
        self.asked.append((start, end))
        data: bytes = super().cat_file(path, start=start, end=end)
        return self.faults.pop(0)(data) if self.faults else data


def raising(error: Exception) -> Fault:
    def fault(_: bytes) -> bytes:
        raise error

    return fault


def hanging(data: bytes) -> bytes:
    time.sleep(5)
    return data


def short(data: bytes) -> bytes:
    return data[:-1]


def reset(data: bytes) -> bytes:
    return raising(ConnectionResetError("reset by peer"))(data)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(module, "RANGE_BYTES", 4000)
    system = fsspec.filesystem("faulty")
    for name, data in FILES.items():
        system.pipe_file(f"/set/{name}", data)
    yield Faulty
    Faulty.faults.clear()
    Faulty.asked.clear()
    Faulty.store.clear()


def write_files(folder: Path) -> Path:
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(params=["path", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    """The same files, on a disk and in memory."""
    if request.param != "memory":
        folder = write_files(tmp_path / "set")
        yield Location(str(folder) + "/" if request.param == "path" else f"file://{folder}", QUICK)
        return
    memory = fsspec.filesystem("memory")
    for name, data in FILES.items():
        memory.pipe_file(f"/set/{name}", data)
    yield Location("memory://set", QUICK)
    memory.rm("/set", recursive=True)


def check_reads(place: Location, tmp_path: Path) -> None:
    """All that a location gives is right."""
    assert place.files() == {"a.arrow": 10_000, "b.bin": 1, "empty": 0}
    assert place.child("sub").files() == {"c.txt": 3}
    assert place.child("sub").parent.size("b.bin") == 1
    assert place.child("sub").name == "sub"
    assert place.exists("a.arrow")
    assert not place.exists("z")
    assert place.size("sub/c.txt") == 3
    assert place.read("a.arrow") == DATA
    assert place.read("a.arrow", 9_990) == DATA[9_990:]
    assert place.read("a.arrow", 10, 100) == DATA[10:110]
    assert place.read("empty") == b""
    target = tmp_path / "target"
    place.fetch("a.arrow", target, xxh3=HASH, whole=10_000)
    assert target.read_bytes() == DATA
    place.fetch("a.arrow", target, start=7, size=4_321)
    assert target.read_bytes() == DATA[7:4_328]
    place.fetch("empty", target)
    assert target.read_bytes() == b""
    for call in (place.size, place.read, lambda name: place.fetch(name, tmp_path / "none"), place.child("z").size):
        with pytest.raises(FileNotFoundError, match="no such file"):
            call("z")
    with pytest.raises(FileNotFoundError):
        place.child("nowhere").files()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["target"]


def test_files_on_a_disk_and_in_memory(place: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", 999)
    check_reads(place, tmp_path)
    assert place.exists("sub")
    with pytest.raises(FileNotFoundError, match=r"a.arrow is a file, and no folder|a.arrow: .*NotADirectoryError"):
        place.child("a.arrow").files()
    with pytest.raises(FileNotFoundError, match="sub is a folder"):
        place.size("sub")
    for name in ("", "/etc/passwd", "../a.arrow", "sub/../../x"):
        with pytest.raises(ValueError, match="is not a name inside"):
            place.size(name)
    with pytest.raises(RemoteError, match=r"has 10000 bytes: must have 9999; it was cut short or replaced"):
        place.fetch("a.arrow", tmp_path / "none", whole=9_999)


def test_what_is_local(tmp_path: Path) -> None:
    assert Location(tmp_path).path == Location(f"file://{tmp_path}/").path == tmp_path
    assert Location("data/set").path == Path("data/set")
    assert Location("data").parent.path == Path()
    assert Location("file:///").path == Location("/").path == Path("/")
    assert not Location("memory://set").is_local
    with pytest.raises(ValueError, match="memory://set is not a local folder"):
        _ = Location("memory://set").path
    with pytest.raises(ValueError, match="has no folder above it"):
        _ = Location("memory://set").parent


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://x", "fsspec knows no protocol 'nonsense'"),
        ("driverless://x", "driver is not installed: Install driverlessfs"),
        ("zip://a::memory://x", "chains of file systems"),
        ("http://localhost/set?token=1", "a URL with a query"),
    ],
)
def test_urls_that_can_not_be(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_module.System", "err": "Install driverlessfs"}
    monkeypatch.setitem(sys.modules["fsspec.registry"].known_implementations, "driverless", entry)
    with pytest.raises(ValueError, match=message):
        Location(url)


def test_fsspec_is_imported_for_urls_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    code = (
        "import sys; from seqmesh.loader.storage.location import Location\n"
        "Location(sys.argv[1]).read('a'); print(*sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, tmp_path], check=True, capture_output=True, text=True, timeout=60
    )
    assert not {"fsspec", "aiohttp", "s3fs"} & set(output.stdout.split())


@pytest.mark.parametrize("faults", [[short], [reset, reset, short], [raising(TimeoutError())] * 3])
def test_requests_that_fail_are_made_again(faulty: type[Faulty], tmp_path: Path, faults: list[Fault]) -> None:
    faulty.faults[:] = list(faults)
    Location("faulty://set", QUICK).fetch("a.arrow", tmp_path / "a", xxh3=HASH)
    assert (tmp_path / "a").read_bytes() == DATA
    ranges = [(0, 4000), (4000, 8000), (8000, 10_000)]
    assert faulty.asked == [ranges[0]] * len(faults) + ranges  # one at a time, only what is missing again
    assert os.listdir(tmp_path) == ["a"]


def test_what_goes_on_failing_is_an_error(faulty: type[Faulty], tmp_path: Path) -> None:
    faulty.faults[:] = [lambda data: data] + [short] * 3 + [reset]
    expected = (
        r"reading bytes 4000 to 8000 of faulty://set/a.arrow: failed 4 times in .* s, last: ConnectionResetError: "
        r"reset by peer; check the network"
    )
    with pytest.raises(RemoteError, match=expected):
        Location("faulty://set", QUICK).fetch("a.arrow", tmp_path / "a")
    assert not os.listdir(tmp_path)


def test_a_storage_that_hangs_is_left_at_the_deadline(faulty: type[Faulty], tmp_path: Path) -> None:
    began = time.monotonic()
    faulty.faults[:] = [hanging]
    place = Location("faulty://set", Patience(seconds=1, tries=3, pause=0.01))
    place.fetch("a.arrow", tmp_path / "a", xxh3=HASH)  # the other tries have time left
    faulty.faults[:] = [hanging] * 9
    with pytest.raises(RemoteError, match=r"failed 3 times .* TimeoutError: no answer in time"):
        place.read("a.arrow")
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raising(PermissionError("Forbidden")), r"refused: PermissionError: Forbidden; check the credentials"),
        (raising(TypeError("a bug")), "refused: TypeError: a bug; another try would not mend it"),
        (lambda data: data + data, "gave 8000 bytes: it does not serve ranges"),
    ],
)
def test_what_another_try_can_not_mend(faulty: type[Faulty], fault: Fault, message: str) -> None:
    faulty.faults[:] = [fault]
    with pytest.raises(RemoteError, match=message):
        Location("faulty://set", QUICK).read("a.arrow")
    assert len(faulty.asked) == 1


def test_damage_on_the_way_is_mended_and_damage_there_is_an_error(faulty: type[Faulty], tmp_path: Path) -> None:
    place = Location("faulty://set", QUICK)
    faulty.faults[:] = [lambda data: data[:-1] + bytes([data[-1] ^ 1])]
    place.fetch("a.arrow", tmp_path / "a", xxh3=HASH)
    assert checksum(tmp_path / "a") == HASH
    with pytest.raises(RemoteError, match="its checksum is not 00, twice: it is damaged, or was replaced"):
        place.fetch("a.arrow", tmp_path / "b", xxh3="00")
    assert os.listdir(tmp_path) == ["a"]


def test_passwords_are_not_shown(faulty: type[Faulty]) -> None:
    place = Location("faulty://me:pass:w@rd@set", QUICK)
    assert str(place.child("x")) == "faulty://me:***@set/x"
    assert "w@rd" not in repr(place) + str(place.parent if "/" in place.url[9:] else "")
    faulty.faults[:] = [raising(OSError("GET http://me:pass:w@rd@set/a.arrow, and http://u:w@rd@x"))] * 4
    for call in (place.read, place.size):
        with pytest.raises((RemoteError, FileNotFoundError)) as caught:
            call("a.arrow" if call == place.read else "z")
        assert "w@rd" not in str(caught.value)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert without_password("see s3://bucket/a and mail a:b@c") == "see s3://bucket/a and mail a:b@c"


def test_a_folder_is_listed_anew_each_time() -> None:
    """Drivers keep listings."""

    class Listing(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        protocol = "listing"
        kept: ClassVar[list[Any]] = []

        def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
            if not self.kept:
                self.kept.append(super().ls(path.removeprefix("listing://"), detail=detail, **options))
            return self.kept[0]

        def invalidate_cache(self, path: str | None = None) -> None:
            del path
            self.kept.clear()

    fsspec.register_implementation("listing", Listing, clobber=True)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/listed/a", b"a")
    place = Location("listing://listed")
    place._opened = (os.getpid(), Listing(), "/listed")
    assert place.files() == {"a": 1}
    memory.pipe_file("/listed/b", b"bb")
    assert place.files() == {"a": 1, "b": 2}
    memory.rm("/listed", recursive=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("http")
    write_files(folder / "set")
    with http_server(folder) as port:
        yield folder, port


def test_files_over_http(served: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(module, "RANGE_BYTES", 4000)
    folder, port = served
    place = Location(f"http://127.0.0.1:{port}/set", QUICK)
    check_reads(place, tmp_path)
    (folder / "set" / "a new one").write_bytes(b"new")
    try:
        assert place.files()["a new one"] == 3
        assert place.read("a new one") == b"new"
    finally:
        (folder / "set" / "a new one").unlink()
    (folder / "secret").write_bytes(b"")
    with pytest.raises(RemoteError, match=r"refused: ClientResponseError: 403.*; check the credentials"):
        place.parent.size("secret")


def test_connections_that_are_cut(served: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(module, "RANGE_BYTES", 4000)
    with link_to(served[1]) as link:
        place = Location(f"http://127.0.0.1:{link.port}/set", QUICK)
        link.limit, link.cuts = 2000, 3
        place.fetch("a.arrow", tmp_path / "a", size=10_000, xxh3=HASH)
        assert link.was_cut == 3
        link.cuts = 100
        with pytest.raises(RemoteError, match="failed 4 times"):
            place.fetch("a.arrow", tmp_path / "b", size=10_000)
    for call in (lambda: place.fetch("a.arrow", tmp_path / "b"), lambda: place.exists("a.arrow"), place.files):
        with pytest.raises(RemoteError, match=r"failed 4 times .*Connect call failed"):  # nobody listens
            call()
    assert os.listdir(tmp_path) == ["a"]


def test_a_server_that_hangs_is_left_at_the_deadline(served: tuple[Path, int]) -> None:
    pytest.importorskip("aiohttp")
    (served[0] / "stuck").write_bytes(b"stuck")
    place, began = (
        Location(f"http://127.0.0.1:{served[1]}", Patience(seconds=0.5, tries=2, pause=0.01)),
        time.monotonic(),
    )
    with pytest.raises(RemoteError, match=r"failed 2 times .* no answer in time"):
        place.read("stuck", 0, 5)
    assert time.monotonic() - began < STUCK_SECONDS


def test_threads_and_a_forked_process_share_a_location(served: tuple[Path, int]) -> None:
    pytest.importorskip("aiohttp")
    place, found = Location(f"http://127.0.0.1:{served[1]}/set", QUICK), list[bytes]()
    threads = [threading.Thread(target=lambda: found.append(place.read("a.arrow"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [DATA] * 8
    code = (
        "import os, sys; from seqmesh.loader.storage.location import Location\n"
        "place = Location(sys.argv[1]); first = place.read('a.arrow')\n"
        "if not (pid := os.fork()): os._exit(place.read('a.arrow') != first)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code, place.url], timeout=60).returncode == 0


def test_a_kill_while_a_file_comes_leaves_none(served: tuple[Path, int], tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    code = (
        "import sys, time; from pathlib import Path; from seqmesh.loader.storage import location\n"
        "location.RANGE_BYTES = 1000; ranges = location.Location._range\n"
        "location.Location._range = lambda *a: (print('range', flush=True), time.sleep(0.01), ranges(*a))[2]\n"
        "location.Location(sys.argv[1]).fetch('a.arrow', Path(sys.argv[2]))"
    )
    url, target = f"http://127.0.0.1:{served[1]}/set", tmp_path / "a"
    with (
        subprocess.Popen([sys.executable, "-c", code, url, target], stdout=subprocess.PIPE, text=True) as process,
        killed_after(process),
    ):
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(4)] == ["range\n"] * 4
    (left,) = os.listdir(tmp_path)
    assert left.startswith("a.")
    assert left.endswith(".tmp")
    Location(url, QUICK).fetch("a.arrow", target, xxh3=HASH)
    assert target.read_bytes() == DATA


def test_files_in_an_s3_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", 4000)
    with s3_server() as port, link_to(port) as link, s3_settings(link.port) as environment:
        system = fsspec.filesystem("s3")
        system.mkdir(BUCKET)
        for name, data in FILES.items():
            system.pipe_file(f"{BUCKET}/set/{name}", data)
        place = Location(f"s3://{BUCKET}/set", QUICK)
        check_reads(place, tmp_path)
        other = fsspec.filesystem("s3", skip_instance_cache=True)
        other.pipe_file(f"{BUCKET}/set/new", b"new")
        assert place.files()["new"] == 3
        link.limit, link.cuts = 3000, 3
        place.fetch("a.arrow", tmp_path / "cut", size=10_000, xxh3=HASH)
        assert link.was_cut == 3
        code = "import sys; from seqmesh.loader.storage.location import Location; print(Location(sys.argv[1]).files())"
        command = [sys.executable, "-c", code, place.url]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
        assert output.stdout == f"{place.files()}\n"
