"""What processes took, as the kernel accounts for it: CPU time of one, of all below one, memory. Linux."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in /proc
MEGABYTE = 1e6
STATUS = Path("/proc/self/status")
RESET_PEAK = "5"  # what the kernel wants written to clear_refs (man 5 proc)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: seconds on the wall, of CPU in this process, of CPU in it and all that it started."""

    wall: float
    trainer: float
    total: float

    @classmethod
    def now(cls) -> Mark:
        own = time.process_time()
        return cls(time.monotonic(), own, own + cpu_of_children())

    def since(self, earlier: Mark) -> dict[str, float]:
        return {
            "wall": self.wall - earlier.wall,
            "trainer": self.trainer - earlier.trainer,
            "total": self.total - earlier.total,
        }


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Let this thread, and what it starts in the block, run on no more cores than these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_of_children() -> float:
    """CPU seconds of the processes that this one started, and that they started: those that have ended and were
    waited for, and those that live (to a hundredth of a second)."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return waited.ru_utime + waited.ru_stime + sum(map(_cpu_of, descendants(os.getpid())))


def descendants(pid: int) -> list[int]:
    """Processes under `pid` that live, at any depth."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and (fields := _stat(int(each.name))):
            children.setdefault(int(fields[1]), []).append(int(each.name))
    found = children.get(pid, [])
    for each_child in found:  # grows while it is read
        found.extend(children.get(each_child, []))
    return found


def _cpu_of(pid: int) -> float:
    """In user and system mode, of the process and of its children that it waited for."""
    return sum(map(int, _stat(pid)[11:15])) / TICKS


def _stat(pid: int) -> list[str]:
    """The kernel's account of a process from its state on (man 5 proc); empty where it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a running process has used, all threads.

    Linux derives the number of a process's CPU clock from its pid in this way (see clock_getcpuclockid); it counts in
    nanoseconds, /proc only in hundredths of a second.
    """
    return time.clock_gettime((~pid << 3) | 2)


def memory_of(pid: int) -> dict[str, float]:
    """Megabytes that a process holds, as the kernel says: anonymous memory, and its share of shared memory, which is
    rings, and the shards where they lie in /dev/shm; none where it does not say."""
    account = Path(f"/proc/{pid}/smaps_rollup")
    if not account.exists():
        return {}
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in _fields(account) if rest.endswith("kB")}
    shared = kilobytes.get("Pss_Shmem", 0)
    return {"anonymous": kilobytes["Anonymous"] * 1024 / MEGABYTE, "shared_memory": shared * 1024 / MEGABYTE}


def _fields(account: Path) -> Iterator[tuple[str, str, str]]:
    return (line.partition(":") for line in account.read_text().splitlines())


def measurable() -> bool:
    """Whether this system says how much memory a process holds and held."""
    return STATUS.exists() and all(name in STATUS.read_text() for name in ("VmRSS:", "VmHWM:"))


def held_bytes(name: str) -> int:
    """A line of the kernel's account of this process: VmRSS, what it holds, or VmHWM, the most that it held."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Set VmHWM back to VmRSS; where that is not allowed, VmHWM stays an upper limit."""
    try:
        STATUS.with_name("clear_refs").write_text(RESET_PEAK)
    except OSError:
        return  # not allowed here
