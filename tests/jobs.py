"""Whole training jobs for tests: `seqmesh train` in a session of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from seqmesh.trainer.monitor import read_steps
from tests.warm import Program, forked

STEPS = 12
SECONDS = 120
VOCAB = 60


def write_job(folder: Path, data: Path, **changes: Any) -> Path:
    job = {
        "run": str(folder / "run"),
        "steps": STEPS,
        "ranks": 2,
        "loader": {"data": str(data), "tokens_per_step": 128, "capacity": 48, "overlong": "split", "seed": 5},
        "model": {"vocab_size": VOCAB, "width": 16, "layers": 1, "heads": 2, "kv_heads": 1},
        "optim": {"lr": 1e-2},
        "checkpoint": {"every": 2},
        "step_timeout": SECONDS,  # other tests run at the same time
        "heartbeat": SECONDS,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job | changes))
    return folder / "job.yaml"


@contextmanager
def start(job: Path, *overrides: str, before: Callable[[], None] | None = None) -> Iterator[Program]:
    """The running job; killed at the end of the block if it still runs. overrides: of settings, and options. before:
    called in the new process, before the command; must pickle."""
    with forked(["-m", "seqmesh.tools.cli", "train", str(job), *overrides], before=before) as process:
        yield process


def finish(job: Path, *overrides: str, seconds: float = SECONDS) -> str:
    """Run to the end; what it said."""
    with start(job, *overrides) as process:
        output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output
    return output


def run_command(job: Path) -> None:
    """The same in new interpreters, as a person starts it."""
    command = [sys.executable, "-m", "seqmesh.tools.cli", "train", str(job)]
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)


def kill_after(job: Path, step: int, *overrides: str) -> None:
    """SIGKILL torchrun once `step` is in the log; its ranks must follow by themselves."""
    with start(job, *overrides) as process:
        wait_for_step(process, job, step)
        os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(ranks_of(job)), 10, "ranks went on without torchrun")


def kill_rank(job: Path, rank: int, steps: int, *, in_save: bool = False) -> str:
    """SIGKILL one rank so many steps further on, or as soon after as a checkpoint is being written; what the job said
    while it ended. Fails if it ends by itself."""
    step, before = max(logged(job), default=0) + steps, half_checkpoints(job)
    with start(job) as process:
        wait_for_step(process, job, step)
        pid = rank_pid(job, rank)
        if in_save:
            wait_until(lambda: half_checkpoints(job) - before != set(), SECONDS, "nothing was saved", every=1e-4)
        os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output
    return output


def half_checkpoints(job: Path) -> set[Path]:
    """Folders of saves that have not ended."""
    return set((job.parent / "run").glob(".step-*"))


def wait_for_step(process: Program, job: Path, step: int) -> None:
    """Until the log shows a step; fails if the job ends before."""

    def reached() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return max(logged(job), default=0) >= step

    wait_until(reached, SECONDS, f"step {step} was not reached")


def wait_until(condition: Callable[[], bool], seconds: float, failure: str, *, every: float = 0.01) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(every)


def ranks_of(job: Path) -> Iterator[int]:
    """Processes that train this job."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode() if entry.name.isdigit() else ""
        except OSError:
            continue
        if str(job) in command and "seqmesh.trainer.train" in command:
            yield int(entry.name)


def rank_pid(job: Path, rank: int) -> int:
    """The process of one rank."""
    for pid in ranks_of(job):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return pid
    raise AssertionError(f"rank {rank} is not running")


def logged(job: Path) -> dict[int, dict[str, Any]]:
    log = job.parent / "run" / "log.jsonl"
    return read_steps(log) if log.exists() else {}
