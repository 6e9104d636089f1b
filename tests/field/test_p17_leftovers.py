"""Shared memory outlived crashes, was removed by bystanders, and was mixed up by jobs that ran at the same time."""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rich.console import Console

from seqmesh.loader.embedded import Loader
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.tools import doctor
from seqmesh.tools.leftovers import find_leftovers
from tests.serving import SECONDS, RankProcess, digests_inline, is_running, wait_until
from tests.support import killed_after, long_tail, make_set, settings_for

GRACE_SECONDS = 5

# A training job's first rank, which owns the loader; it holds a view of its ring, and is told when to go on.
OWNER = """
import json, sys
from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.feed import Position
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.tools import doctor
from seqmesh.tools.leftovers import find_leftovers
from seqmesh.loader.stream import StreamState
with LoaderProcess(LoaderSettings.from_json(sys.argv[1]), restarts=3) as process:
    client = Client(process.endpoint, rank=0, credit=4096, timeout=20, alive=process.check)
    client.subscribe(Position(StreamState.from_dict(client.welcome().state)))
    delivery = client.next()
    print(json.dumps([process.endpoint, process.pid, batch_digest(delivery.batch)]), flush=True)
    sys.stdin.readline()
    digests = []
    while (delivery := client.next()) is not None:
        digests.append(batch_digest(delivery.batch))
    client.close()
print(json.dumps(digests), flush=True)
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    data = make_set(tmp_path_factory.mktemp("set"), long_tail(100, 40))
    return settings_for(data, ranks=2, capacity=48).resolved()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Job:
    """An owner with its loader. first: the digest of its first batch."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        self.endpoint, self.loader, self.first = json.loads(process.stdout.readline())

    def finish(self) -> list[str]:
        """Let it read to the end; its digests."""
        output, _ = self.process.communicate("\n", timeout=SECONDS)
        return [self.first, *json.loads(output)]

    def is_gone(self) -> bool:
        return not is_running(self.loader) and self.process.poll() is not None


@contextmanager
def job(settings: LoaderSettings) -> Iterator[Job]:
    command, pipe = [sys.executable, "-c", OWNER, settings.to_json().decode()], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process, killed_after(process):
        yield Job(process)


def shared_memory() -> set[str]:
    """Whatever might be ours among what has a name in shared memory."""
    return {name for name in os.listdir("/dev/shm") if "seqmesh" in name and not name.startswith("seqmesh-bench-")}


def open_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.usefixtures("runtime")
def test_a_job_that_was_killed_as_a_whole_can_start_again_at_once(settings: LoaderSettings) -> None:
    before, start = shared_memory(), Position(Feed(settings).start)
    for _ in range(2):
        with job(settings) as each, RankProcess(each.endpoint, 1, start, keeps=True) as rank:
            assert each.first == digests_inline(settings, 0)[0]
            assert rank.take(2) == digests_inline(settings, 1)[:2]
            for pid in (each.loader, each.process.pid, rank.process.pid):
                os.kill(pid, signal.SIGKILL)
        assert shared_memory() == before
    with job(settings) as third:
        assert third.finish() == digests_inline(settings, 0)
    assert third.is_gone()


def test_two_jobs_at_once_never_meet(settings: LoaderSettings, tmp_path: Path, runtime: Path) -> None:
    """Same places in the shards, other data; the end of one, however it ends, leaves the other's ring alone."""
    other = settings_for(make_set(tmp_path / "other", [7] * 100), ranks=2, capacity=48).resolved()
    assert digests_inline(settings, 0)[0] != digests_inline(other, 0)[0]
    with job(settings) as first, job(other) as second, job(other) as third:
        assert len({first.endpoint, second.endpoint, third.endpoint}) == 3
        assert second.finish() == digests_inline(other, 0)
        third.process.kill()
        wait_until(lambda: second.is_gone() and third.is_gone())
        assert first.finish() == digests_inline(settings, 0)
    assert first.is_gone()
    wait_until(lambda: [path.name for path in runtime.iterdir()] == ["other"])


@pytest.mark.parametrize("end", ["ends", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_after_any_end(settings: LoaderSettings, runtime: Path, end: str) -> None:
    before = shared_memory()
    with job(settings) as each:
        assert list(runtime.iterdir())
        if end == "ends":
            each.finish()
        else:
            each.process.send_signal(getattr(signal, end))
        wait_until(lambda: each.is_gone() and not list(runtime.iterdir()), GRACE_SECONDS)
    assert shared_memory() == before


def test_loaders_that_come_and_go_leave_no_descriptors(settings: LoaderSettings) -> None:
    """Neither in a process that opens one after the other nor in the loader that serves them all."""

    def read_some(endpoint: str | None, *, views: bool) -> None:
        with Loader(settings, endpoint=endpoint, rank=0, views=views, credit_bytes=4096, timeout=SECONDS) as loader:
            for number, batch in enumerate(loader):
                assert batch.tokens
                if number == 5:
                    break  # while more are under way
            del batch

    with LoaderProcess(settings) as process:
        for endpoint in (process.endpoint, None):
            read_some(endpoint, views=True)
        gc.collect()
        ours, theirs = open_descriptors(), open_descriptors(process.pid)
        for number in range(20):
            read_some(process.endpoint, views=number % 2 == 0)
        read_some(None, views=True)  # with a process of its own: they cost a while
        gc.collect()
        assert open_descriptors() == ours
        wait_until(lambda: open_descriptors(process.pid) <= theirs, GRACE_SECONDS)


def test_the_doctor_removes_what_killed_jobs_left_and_nothing_else(settings: LoaderSettings, runtime: Path) -> None:
    before = shared_memory()
    with job(settings) as killed, job(settings) as living:
        for pid in (killed.process.pid, killed.loader):
            os.kill(pid, signal.SIGKILL)
        killed.process.wait()
        assert len(find_leftovers([runtime])) == 1
        with suppress(SystemExit):  # of what else is wrong with this machine
            doctor.run(clean=True, console=Console(quiet=True))
        (left,) = runtime.iterdir()
        assert str(left) in living.endpoint
        assert living.finish() == digests_inline(settings, 0)
    assert (list(runtime.iterdir()), shared_memory()) == ([], before)
