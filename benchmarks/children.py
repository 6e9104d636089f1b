"""Whole processes as candidates: what one took from its start to its end, with all that it started.

Linux. CPU seconds are the kernel's account of the process and of every process below it that was waited for. Memory is
the sum of the most that each of its processes ever held, which is at least the most that all held at one time; pages
that several of them share are counted for each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from seqmesh.benchmarks.processes import descendants

EVERY = 0.02  # seconds between looks at memory
LAST_WORDS = 2_000  # characters of a failed process's output to repeat
CLI = (sys.executable, "-m", "seqmesh.tools.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """cpu, wall: seconds. peak: bytes, 0 where it was not watched. said: all that it printed."""

    cpu: float
    wall: float
    peak: int
    said: str


def spend(command: Sequence[str], *, environment: Mapping[str, str] | None = None, watch: bool = False) -> Spent:
    """Run a command to its end. Raises RuntimeError with the end of what it said where it fails."""
    places = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
    peaks: dict[int, int] = {}
    with TemporaryFile() as output:
        begin = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=places
        )
        status, cpu = _waited(process.pid, peaks if watch else None)
        wall = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode(errors="replace")
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:6])} ended with exit code {process.returncode}:\n{said[-LAST_WORDS:]}")
    return Spent(cpu=cpu, wall=wall, peak=sum(peaks.values()), said=said)


def _waited(pid: int, peaks: dict[int, int] | None) -> tuple[int, float]:
    """Exit status and CPU seconds of a child, once it has ended; meanwhile notes peaks, if there is where to."""
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG if peaks is not None else 0)
        if ended:
            return status, usage.ru_utime + usage.ru_stime
        if peaks is not None:
            _look(pid, peaks)
        time.sleep(EVERY)


def _look(pid: int, peaks: dict[int, int]) -> None:
    for each in (pid, *descendants(pid)):
        peaks[each] = max(peaks.get(each, 0), _peak(each))


def _peak(pid: int) -> int:
    """The most that a process has held so far, 0 where it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
