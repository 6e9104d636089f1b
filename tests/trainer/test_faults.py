"""Faults of a running job: each ends it, or is mended, within a deadline, and the words name the thing."""

import contextlib
import functools
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from seqmesh.loader.manifest import read_manifest
from tests.jobs import SECONDS, VOCAB, finish, logged, rank_pid, ranks_of, start, wait_for_step, wait_until, write_job
from tests.support import long_tail, make_set

ENDLESS = 1_000_000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_set(tmp_path / "set", long_tail(80, 40), vocab=VOCAB)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sockets go here, so that what is left over can be seen."""
    folder = tmp_path / "r"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def loader_pids(job: Path) -> list[int]:
    """Loader processes started by a rank of this job, from whichever of its threads."""
    found: list[int] = []
    for pid in ranks_of(job):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def test_a_rank_that_dies_ends_the_job_and_is_named(tmp_path: Path, data: Path, runtime: Path) -> None:
    """In mode `waves`; test_train.py has the other."""
    job = write_job(tmp_path, data, steps=ENDLESS, timeout=20)
    with start(job, "loader.mode=waves") as process:
        wait_for_step(process, job, 2)
        os.kill(rank_pid(job, 1), signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "rank 1 died or stopped" in output or "rank 1 ended with exit code -9" in output
    assert not any(ranks_of(job))
    wait_until(lambda: not list(runtime.iterdir()), 10, "a socket folder was left")


def test_a_rank_that_stops_ends_the_job_after_a_heartbeat_and_is_named(
    tmp_path: Path, data: Path, runtime: Path
) -> None:
    job = write_job(tmp_path, data, steps=ENDLESS, heartbeat=2)
    with start(job) as process:
        wait_for_step(process, job, 2)
        stopped = rank_pid(job, 1)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        output, _ = process.communicate(timeout=SECONDS)  # no exchange would time out before
        assert time.monotonic() - began < 20  # torchrun alone would take 30 to kill the one that is stopped
    assert process.returncode == 1
    assert "rank 1 died or stopped: silent for 2 s (heartbeat)" in output
    assert not any(ranks_of(job))
    assert not Path(f"/proc/{stopped}").exists()
    wait_until(lambda: not list(runtime.iterdir()), 10, "a socket folder was left")


def test_ranks_are_started_again_after_the_first_has_died_and_the_job_goes_on(
    tmp_path: Path, data: Path, runtime: Path
) -> None:
    """The first rank takes the loader and the ranks' store with it."""
    job = write_job(tmp_path, data, steps=8, checkpoint={"every": 2, "background": False})
    with start(job, "--max-restarts", "1") as process:
        wait_for_step(process, job, 3)
        os.kill(rank_pid(job, 0), signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert output.count("resumed from") == 1
    assert list(logged(job)) == list(range(1, 9))
    wait_until(lambda: not list(runtime.iterdir()), 10, "a socket folder was left")


def test_a_loader_that_dies_is_started_again_and_nothing_changes(tmp_path: Path, data: Path, runtime: Path) -> None:
    quiet = write_job(make_folder(tmp_path / "quiet"), data, steps=40)
    finish(quiet)
    job = write_job(make_folder(tmp_path / "killed"), data, steps=40)
    with start(job, "credit_bytes=600") as process:
        for step in (2, 9):
            wait_for_step(process, job, step)
            (loader,) = loader_pids(job)
            os.kill(loader, signal.SIGKILL)
            wait_until(functools.partial(restarted, job, loader), 30, "it was not started again")
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    for rank in range(2):
        name = f"run/batches-{rank}.jsonl"
        assert (quiet.parent / name).read_text() == (job.parent / name).read_text()
    assert [record["loss"] for record in logged(job).values()] == [record["loss"] for record in logged(quiet).values()]
    wait_until(lambda: not list(runtime.iterdir()), 10, "a socket folder was left")


def restarted(job: Path, dead: int) -> bool:
    return bool(set(loader_pids(job)) - {dead})


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [("missing", "is missing"), ("truncated", "bytes, the manifest says"), ("flipped", "is damaged: its checksum")],
)
def test_a_damaged_shard_is_named(tmp_path: Path, data: Path, runtime: Path, damage: str, words: str) -> None:
    shard = data / read_manifest(data).shards[1].file
    match damage:
        case "missing":
            shard.unlink()
        case "truncated":
            shard.write_bytes(shard.read_bytes()[:-100])
        case _:
            flip_a_byte(shard)
    job = write_job(tmp_path, data)
    with start(job, "loader.verify=true") as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert f"{shard}: " in output
    assert words in output
    assert "Traceback" not in output
    assert not any(ranks_of(job))
    assert list(runtime.iterdir()) == []


def test_a_full_disk_is_named_and_spoils_no_checkpoint(tmp_path: Path, data: Path, runtime: Path) -> None:
    """Files may grow to 40 kB, then to any size: the checkpoint of the model is between the two. So may a ring, which
    is memory that counts as a file."""
    model = {"vocab_size": VOCAB, "width": 64, "layers": 1, "heads": 2, "kv_heads": 1}
    job = write_job(tmp_path, data, model=model, steps=4, credit_bytes=30_000)
    with start(job, before=functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (40_000, 40_000))) as process:
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "step-00000002" in output
    assert ".safetensors can not be written" in output
    assert "Traceback" not in output
    assert not list((tmp_path / "run").glob("step-*"))
    finish(job)
    assert sorted(path.name for path in (tmp_path / "run").glob("*step-*")) == ["step-00000002", "step-00000004"]
    assert list(runtime.iterdir()) == []
