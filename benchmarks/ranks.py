"""Ranks that a benchmark has torchrun start on this machine: each runs a module of the benchmarks with one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from seqmesh.benchmarks.shards import scratch_folder

TIMEOUT = 600.0  # seconds for all measurements, unless told otherwise
LAST_WORDS = 2_000  # characters of a failed job's output to repeat


def ask_ranks(module: str, job: dict[str, Any], ranks: int, *, timeout: float = TIMEOUT) -> bytes:
    """Run `python -m module JOB OUT` on so many ranks, JOB a file with `job` as JSON; returns what the first rank wrote
    to OUT. Raises RuntimeError with the end of what they said where they fail."""
    with scratch_folder(1 << 20) as scratch:
        asked, answer = scratch / "job.json", scratch / "answer.json"
        asked.write_text(json.dumps(job))
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, "-m", *launch, "-m", module, str(asked), str(answer)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # ranks share the machine's cores: one thread each
        )
        if done.returncode != 0:
            said = done.stdout[-LAST_WORDS:]
            raise RuntimeError(f"the measurement ended with exit code {done.returncode}:\n{said}")
        return answer.read_bytes()
