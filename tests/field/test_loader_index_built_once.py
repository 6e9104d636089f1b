"""Indexes that each rank built for itself, or one rank for all that others read too early: a file that was half there.

Jobs of their own build the same index at the same moment, on a disk of the machine, and on one that they share with
machines that their locks do not reach and that shows late what is there. Whoever can see the file sees all of it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from seqmesh.loader.storage.once import built_once
from tests.support import killed_after

BYTES = 40_000
SECONDS = 20.0

# Waits for a line, then wants the index; says when it begins to build, and what it read. mode "unlocked": as on a
# machine of its own, whose locks reach nobody else.
JOB = """
import os, sys, time
from contextlib import contextmanager
from pathlib import Path
from seqmesh.loader.storage import once

path, mode, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

@contextmanager
def no_lock(*_):
    yield False

if mode == "unlocked":
    once._alone, once._machine = no_lock, lambda: f"machine{os.getpid()}"

def build(target):
    print("build", flush=True)
    with target.open("wb") as file:
        for number in range(100):
            file.write(bytes([number]) * 400)
            file.flush()
            time.sleep(seconds / 100)

print("ready", flush=True)
sys.stdin.readline()
print(len(once.built_once(path, build, timeout=20).read_bytes()), flush=True)
"""


@contextmanager
def job(path: Path, mode: str, seconds: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", JOB, str(path), mode, str(seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process, killed_after(process):  # type: ignore[call-overload]  # of keywords
        yield process


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def expected() -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(bytes([number]) * 400 for number in range(100)))


def build(path: Path) -> None:
    path.write_bytes(b"".join(bytes([number]) * 400 for number in range(100)))


@pytest.mark.parametrize(("mode", "builds"), [("locked", 1), ("unlocked", 2)])
def test_jobs_that_want_an_index_at_once(tmp_path: Path, mode: str, builds: int) -> None:
    path, seen = tmp_path / "index", 0
    with job(path, mode, 0.5) as one, job(path, mode, 0.7) as other:
        assert [heard(one), heard(other)] == ["ready", "ready"]
        say(one)
        say(other)
        while one.poll() is None or other.poll() is None:  # a reader that only looks
            if path.exists():
                assert xxhash.xxh3_128_hexdigest(path.read_bytes()) == expected()
                seen += 1
            time.sleep(0.002)
        said = [one.communicate(timeout=SECONDS)[0].split(), other.communicate(timeout=SECONDS)[0].split()]
    assert seen > 0
    assert sum(words.count("build") for words in said) == builds
    assert [words[-1] for words in said] == [str(BYTES)] * 2
    assert {name for name in os.listdir(tmp_path) if not name.endswith(".lock")} == {"index"}


def test_a_builder_that_is_killed_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with job(path, "locked", 600) as builder, job(path, "locked", 0.1) as other:
        assert [heard(builder), heard(other)] == ["ready", "ready"]
        say(builder)
        assert heard(builder) == "build"
        say(other)  # waits
        time.sleep(0.2)
        assert not path.exists()
        builder.kill()
        assert [heard(other), heard(other)] == ["build", str(BYTES)]
    assert sorted(os.listdir(tmp_path)) == ["index", "index.lock"]  # and nothing half-built


def test_a_file_that_is_seen_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk says for a while that a file which another machine made is not there."""
    path = built_once(tmp_path / "index", build)
    with path.open("rb") as early:
        first = early.read(100)
        monkeypatch.setattr(Path, "exists", lambda _: False)
        built_once(path, lambda _: pytest.fail("was built again, though the folder shows it"))
        monkeypatch.setattr("seqmesh.loader.storage.once._is_listed", lambda _: False)
        built_once(path, build)  # nobody can tell; and it does no harm to who reads it
        assert xxhash.xxh3_128_hexdigest(first + early.read()) == expected()
    assert xxhash.xxh3_128_hexdigest(path.read_bytes()) == expected()
