"""What a rank of `seqmesh bench loader` is asked and what it answers, and the process that carries it out.

Beside ways of reading the set there are two that read a part of it: `FIRST`, the first batch of a loader that starts,
for a fresh process; and `RESUME`, the first batch from a drawn position, in a loader that is open.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Self

COPY, EQUAL, RAW = "mapped copy", "copy of equal bytes", "raw gather"
PLAN, GATHER, INLINE, PROCESS = "plan", "gather", "inline", "process"
FIRST, RESUME = "first batch", "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is asked: read the set of `settings` (LoaderSettings as JSON) in one `way`, `passes` times, as number
    `rank` of its ranks, beginning at `start` of the machine's monotonic clock (seconds), at which all its ranks begin.
    loader: keywords of `Loader`. endpoint: of the loader process. seed: which position `RESUME` draws."""

    way: str
    settings: str
    passes: int = 1
    rank: int = 0
    loader: dict[str, Any] = field(default_factory=dict)
    endpoint: str = ""
    start: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one job took. begin, end: seconds of the monotonic clock. cpu: CPU seconds of the rank, all threads;
    children: of the processes that it started for the job."""

    begin: float
    end: float
    cpu: float
    children: float
    tokens: int


class RankProcess:
    """A running `seqmesh.benchmarks.rank`: ask it, then wait for its answer."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "seqmesh.benchmarks.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # ranks share the machine's cores: one thread each
        )

    def ask(self, job: Job) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Taken:
        """Raises RuntimeError where the process ended instead; it has said why on the standard error output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with exit code {self._process.wait()}")
        return Taken(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it and wait for it."""
        self._process.terminate()
        self._process.communicate()
