"""`seqmesh doctor`: who runs, what is left, what is wrong; and never anything removed that belongs to somebody."""

import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from seqmesh.loader.client import Client
from seqmesh.loader.endpoint import claim_of
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.folder import OWNER
from seqmesh.loader.order import Order, ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.registry import NAME, entries
from seqmesh.loader.settings import LoaderSettings
from seqmesh.tools import checkup, doctor, procfs
from seqmesh.tools.leftovers import find_leftovers, remove
from seqmesh.tools.running import find_running
from tests.serving import SECONDS, digests_inline, free_port, server_process, take, wait_until
from tests.support import make_set, settings_for


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), [5, 9, 3]), ranks=2).resolved()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that private folders are looked for in."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def served(settings: LoaderSettings, endpoint: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """As `seqmesh serve` does at an endpoint that was named."""
    order = Order(settings=settings, endpoint=endpoint, owner=os.getpid(), options=ServeOptions(**options))
    with server_process(order) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def said(code: int = 0, **options: Any) -> str:
    console = Console(width=400, record=True, file=StringIO())
    try:
        doctor.run(console=console, **options)
    except SystemExit as end:
        assert end.code == code
    else:
        assert code == 0
    return console.export_text()


def test_loaders_that_run_are_told_with_their_readers(settings: LoaderSettings, place: Path) -> None:
    port = free_port()
    with (
        LoaderProcess(settings) as first,
        served(settings, f"tcp://127.0.0.1:{port}", metrics="127.0.0.1:0") as second,
    ):
        client = Client(first.endpoint, rank=0, credit=1 << 20, timeout=SECONDS)
        client.subscribe(Position(Feed(settings).start))
        assert take(client, 1)
        said(json_path=place / "out.json")
        found = {each["pid"]: each for each in json.loads((place / "out.json").read_text())["loaders"]}
        client.close()
        one, two = found.pop(first.pid), found.pop(second.pid)
        assert not found
        assert (one["endpoint"], one["data"], one["ranks"]) == (first.endpoint, settings.data, 2)
        assert (one["readers"], two["readers"], two["metrics"]) == ([os.getpid()], [], "127.0.0.1:0")
        assert one["resident_bytes"] > one["shared_bytes"] > 0
        assert all(each["listens"] and not each["stopped"] for each in (one, two))
        words = said(1, ports=(port, free_port()))
        assert f"taken by process {second.pid}: a loader" in words
        assert " ok        free" in words
        with served(settings, f"ipc://{place}/s"):  # a third job that wants an endpoint which is taken
            order = Order(settings=settings, endpoint=f"ipc://{place}/s", owner=os.getpid())
            with server_process(order) as refused:
                _, error = refused.communicate(timeout=SECONDS)
                assert (refused.returncode, "another process listens there" in error) == (2, True)
    assert said(clean=True).startswith("no loader of this user runs here")
    assert not list(entries(place))


def test_only_what_dead_loaders_left_is_removed(settings: LoaderSettings, place: Path) -> None:
    with LoaderProcess(settings) as living, served(settings, f"ipc://{place}/t"):
        with served(settings, f"ipc://{place}/s") as killed:
            killed.send_signal(signal.SIGKILL)
            killed.wait()
        other, foreign = (place / name for name in ("seqmesh-container", "seqmesh-foreign"))
        for folder, owner in ((other, "pid:[1] 1 1"), (foreign, f"{os.readlink('/proc/self/ns/pid')} {killed.pid} 1")):
            folder.mkdir()
            (folder / OWNER).write_text(owner)
        if os.geteuid() == 0:
            os.chown(foreign, 12345, 12345)
        before = set(place.iterdir())
        words = said()
        assert words.count("seqmesh doctor --clean removes it") == 3 + (os.geteuid() != 0)
        assert set(place.iterdir()) == before
        left = {each.path for each in find_leftovers([place])}
        assert {place / "s", place / "s.rings"} < left
        assert "removed" in said(clean=True)
        assert before - set(place.iterdir()) == left
        assert {other, place / "t", place / "t.rings", living.log.parent} <= set(place.iterdir())
        client = Client(living.endpoint, rank=0, credit=1 << 20, timeout=SECONDS)
        client.subscribe(Position(Feed(settings).start))
        assert take(client) == digests_inline(settings, 0)
        client.close()


def test_what_somebody_is_about_to_use_stays(settings: LoaderSettings, place: Path) -> None:
    endpoint = f"ipc://{place}/s"
    with served(settings, endpoint) as killed:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    sockets = [each for each in find_leftovers([place]) if each.endpoint]
    claim = claim_of(endpoint)
    assert claim is not None
    with claim.acquire(blocking=False):
        assert [remove(each) for each in sockets] == [False, False]
    with socket.socket(socket.AF_UNIX) as listener:
        sockets[0].path.unlink()
        listener.bind(str(sockets[0].path))
        listener.listen()
        assert not remove(sockets[0])
        assert not [each for each in find_leftovers([place]) if each.endpoint]
    assert remove(sockets[1])
    (folder,) = find_leftovers([place])[-1:]
    (folder.path / OWNER).write_text("pid:[1] 1 1")
    assert not remove(folder)
    assert (folder.path / NAME).exists()


def test_a_loader_that_is_stopped_or_not_to_be_reached_is_told(settings: LoaderSettings, place: Path) -> None:
    with served(settings, f"ipc://{place}/s") as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: procfs.status(process.pid)["State"].startswith("T"))
        assert f"kill -CONT {process.pid}" in said()
        process.send_signal(signal.SIGCONT)
        (place / "s").unlink()
        wait_until(lambda: not find_running([place])[0].stopped)
        words = said(1)
        assert f"nobody listens at ipc://{place}/s" in words
        assert f"kill {process.pid}" in words


def test_a_port_is_free_or_somebodys() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert any(each.port == port and not each.is_everywhere for each in procfs.listeners())
        finding = checkup.check_port(port, [])
        assert (finding.level, f"taken by process {os.getpid()}: " in finding.found) == ("problem", True)
        assert procfs.command_of(os.getpid()) in finding.found
    assert checkup.check_port(port, []).found == "free"


@pytest.mark.parametrize(
    ("soft", "level"), [(100, "problem"), (1000, "warning"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_open_files(soft: int, level: str) -> None:
    assert checkup.check_open_files(soft, resource.RLIM_INFINITY).level == level


def test_memory_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.check_memory().level in ("ok", "warning")
    levels = [checkup._memory("memory", available, "").level for available in (1 << 20, 1 << 29, 1 << 31)]
    assert levels == ["problem", "warning", "ok"]
    assert "--shm-size" in _small_shared_memory(monkeypatch).advice
    assert checkup.check_shared_memory(tmp_path / "none").level == "ok"
    assert checkup.check_place(tmp_path / "none").level == "problem"
    (deep := tmp_path / ("x" * 90)).mkdir()
    assert "too long for a socket" in checkup.check_place(deep).found
    (control := tmp_path / "control").mkdir()
    for limit, expected in (("1000", [(1000, 400)]), ("max", []), (str(1 << 62), [])):
        (control / "memory.max").write_text(limit)
        (control / "memory.current").write_text("400")
        assert list(procfs._limits(control, "memory.max", "memory.current")) == expected
    (finding,) = checkup.check_cgroup((1 << 31, 1 << 30))
    assert (finding.level, "2.0 GiB, and uses 1.0 GiB" in finding.found) == ("ok", True)


def _small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> checkup.Finding:
    found = os.statvfs("/")
    small = os.statvfs_result([4096, 4096, 16384, 16384, 16384, *found[5:]])
    with monkeypatch.context() as context:
        context.setattr(os, "statvfs", lambda _: small)
        return checkup.check_shared_memory(Path("/dev/shm"))


def test_compiled_routines_are_kept_where_it_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/elsewhere")
    assert checkup.check_cache().level == "ok"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "NUMBA_CACHE_DIR" in checkup.check_cache().advice
