"""Field case: compiled routines and where they are kept. An installation that the user can not write to, a home that
takes no cache either, and as many processes as a machine has ranks starting at once on an empty cache: others fail on
import, or read a cache file that another process has half written. Compiled routines must also leave the interpreter to
other threads, and give one answer whatever the number of threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError
from seqmesh.packer import pack
from seqmesh.packer.bins import METHODS
from tests.serving import digests_inline
from tests.support import make_set, settings_for

ROOT = Path(__file__).parents[2]
PROCESSES = 8
STRANGER = 65534  # nobody
SECONDS = 300

PROGRAM = """
import json, os, time
from seqmesh.packer import pack
begin = time.perf_counter()
bins = pack([3, 1, 4, 1, 5, 9, 2, 6], 10, method="next_fit")
answer = [bins.pieces(index).tolist() for index in range(bins.count)]
seconds = time.perf_counter() - begin
import seqmesh.packer.jit as home
print(json.dumps({"answer": answer, "seconds": seconds, "home": home.__file__, "user": os.getuid()}))
"""

EXPECTED = [[0, 1, 2, 3], [4], [5], [6, 7]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """A read-only copy of the package, a folder for temporary files, and how to start Python as a user of them."""

    folder: Path
    temporary: Path
    python: str
    user: int

    def start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(self.folder), *packages()])
        environment = {"PYTHONPATH": path, "TMPDIR": str(self.temporary), "HOME": str(self.folder)}
        pipe = subprocess.PIPE
        user: dict[str, Any] = {"user": self.user, "group": self.user, "extra_groups": []} if os.getuid() == 0 else {}
        return subprocess.Popen(
            [self.python, "-c", PROGRAM], env=environment, cwd="/", stdout=pipe, stderr=pipe, text=True, **user
        )

    def answers(self, processes: int) -> list[dict[str, Any]]:
        """What processes print that start at once."""
        started = [self.start() for _ in range(processes)]
        try:
            words = [process.communicate(timeout=SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0] * processes, words
        return [json.loads(out) for out, _ in words]


def packages() -> list[str]:
    """Where numba and numpy are, for an interpreter that is not the one of this environment."""
    return sorted({str(Path(module.__file__ or "").parents[1]) for module in (numba, np)})


def python_for(user: int) -> str:
    """An interpreter of this version that the user may run: this one may be in another's home."""
    found = shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}", path="/usr/local/bin:/usr/bin")
    for python in filter(None, (sys.executable, found)):
        command = [python, "-c", "import numba"]
        environment = {"PYTHONPATH": os.pathsep.join(packages())}
        try:
            done = subprocess.run(command, user=user, env=environment, cwd="/", capture_output=True, timeout=SECONDS)
        except PermissionError:
            continue
        if done.returncode == 0:
            return python
    pytest.skip("root may write everywhere, and there is no interpreter that another user may run")


def files_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def install() -> Iterator[Install]:
    """The packer where nobody may write, and no home that takes a cache. Not in pytest's folder, which others of its
    processes close to all other users."""
    user = STRANGER if os.getuid() == 0 else os.getuid()
    python = python_for(user) if os.getuid() == 0 else sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        base = folder / "install"
        shutil.copytree(ROOT / "packer", base / "seqmesh" / "packer", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        inside = [base, *base.rglob("*")]
        for path in inside:
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield Install(folder=base, temporary=folder / "tmp", python=python, user=user)
        for path in inside:
            path.chmod(0o755 if path.is_dir() else 0o644)  # so that it can be removed


def test_eight_processes_of_a_user_without_a_cache_start_at_once_on_an_empty_cache(install: Install) -> None:
    before = files_of(install.folder)
    first = install.answers(PROCESSES)
    assert [each["answer"] for each in first] == [EXPECTED] * PROCESSES
    assert {each["user"] for each in first} == {install.user}
    assert all(each["home"].startswith(str(install.folder)) for each in first)
    assert files_of(install.folder) == before
    (cache,) = install.temporary.iterdir()
    assert (cache.stat().st_uid, cache.stat().st_mode & 0o777) == (install.user, 0o700)
    (second,) = install.answers(1)
    assert second["answer"] == EXPECTED
    assert second["seconds"] < min(each["seconds"] for each in first) / 2


def test_a_private_folder_of_another_user_is_not_trusted(install: Install) -> None:
    """Who can write a cache decides what runs."""
    planted = install.temporary / f"seqmesh-numba-{install.user}"
    planted.mkdir(mode=0o777)
    planted.chmod(0o777)
    (answer,) = install.answers(1)
    assert answer["answer"] == EXPECTED
    assert list(planted.iterdir()) == []


def lengths_of(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).integers(1, 5000, count)


def longest_pause(work: Callable[[], object]) -> float:
    """How long another thread stood still while `work` went on, as a share of its time."""
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    work()
    end = time.perf_counter()
    done.set()
    thread.join()
    return float(np.diff([begin, *(at for at in ticks if begin < at < end), end]).max()) / (end - begin)


def test_other_threads_run_while_one_packs() -> None:
    lengths = lengths_of(3_000_000)
    pack(lengths[:10], 8192, method="first_fit")
    pauses = (longest_pause(lambda: pack(lengths, 8192, method="first_fit")) for _ in range(5))
    assert any(pause < 0.4 for pause in pauses)  # a busy machine may pause any thread, but not each time


@pytest.mark.parametrize("method", METHODS)
def test_threads_do_not_change_the_answer(method: str) -> None:
    lengths = lengths_of(20_000)
    alone = pack(lengths, 8192, method=method, seed=1)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: pack(lengths, 8192, method=method, seed=1), range(4)))
    for bins in together:
        assert np.array_equal(bins.bin_of, alone.bin_of)
        assert np.array_equal(bins.order, alone.order)


def test_a_loader_that_is_used_after_a_fork_raises_at_once_and_the_owner_goes_on(tmp_path: Path) -> None:
    settings = settings_for(make_set(tmp_path / "set", [10] * 20), tokens_per_step=10, capacity=10)
    with Loader(settings, rank=0, timeout=20) as loader:
        taken = [batch_digest(next(iter(loader)))]
        child = os.fork()
        if child == 0:  # whatever happens, it must not go on with the tests
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    next(iter(loader))
                except LoaderError as error:
                    code = 0 if "which was forked from it" in str(error) else 2
                loader.close()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        taken += [batch_digest(batch) for batch in loader]
    assert taken == digests_inline(settings, 0)
