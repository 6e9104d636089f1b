"""Fuzzes the readers for a number of seconds: `python -m tests.fuzz 600`. A case is a seed, so any can be run again:
`python -m tests.fuzz --seed 123`.

Cases run in processes of their own with bounded memory, because a reader of damaged files may take its process along.
Every seed that fails is printed with what went wrong; the exit code is 1 where one did.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

MEMORY_BYTES = 8 << 30  # of addresses; libraries reserve many
BATCH = 500  # cases of a process


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the readers.")
    parser.add_argument("seconds", type=float, nargs="?", default=60.0)
    parser.add_argument("--seed", type=int, help="run this case alone")
    parser.add_argument("--first", type=int, help="the first seed (default: a random one)")
    parser.add_argument("--batch", action="store_true", help="run cases in this process")
    options = parser.parse_args()
    if options.seed is not None:
        return _run(options.seed, 1)
    first = secrets.randbelow(1 << 48) if options.first is None else options.first
    return _run(first, BATCH) if options.batch else _supervise(first, options.seconds)


def _supervise(first: int, seconds: float) -> int:
    """Batch after batch. One that dies is gone on with after the seed that it had."""
    failed, done, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", "--batch", "--first", str(first + done)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        *printed, last = ended.stdout.splitlines() or [str(first + done)]
        print(*printed, sep="\n", end="\n" if printed else "", flush=True)
        failed += sum(line.startswith("seed ") for line in printed)
        if ended.returncode < 0:
            failed += 1
            print(f"seed {last}: the process died of signal {-ended.returncode}", flush=True)
        done = int(last) - first + 1
    print(f"{done:,} cases from {first}, {failed:,} failed")
    return int(failed > 0)


def _run(first: int, count: int) -> int:
    """Cases in this process. The last line says how far it came, also when it dies."""
    from tests.tools.reading.fuzzing import check_seed

    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    failed = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for seed in range(first, first + count):
            (Path(folder) / "seed").write_text(str(seed))
            try:
                check_seed(seed, Path(folder))
            except Exception:
                failed += 1
                print(f"seed {seed}: {traceback.format_exc(limit=-4)}", flush=True)
    print(first + count - 1)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
