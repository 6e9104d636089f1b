"""What Linux tells of processes, memory and ports in /proc and /sys. Every function takes what it can read: processes
of other users, or that end meanwhile, are passed over. Nothing is changed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENS = "0A"  # the state of a TCP socket
RING = "memfd:seqmesh-ring"
NO_LIMIT = 1 << 60  # what control groups of version 1 say where there is none

# Of a control group: where its version is mounted, the files of its limit and of its use.
CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that listens: address in hexadecimal, as the kernel writes it; inode: by which it is found among the
    descriptors of processes."""

    address: str
    port: int
    inode: int

    @property
    def is_everywhere(self) -> bool:
        return set(self.address) <= {"0"}


def pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdecimal()]


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status; none where the process is gone."""
    with contextlib.suppress(OSError):
        lines = (PROC / str(pid) / "status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def kilobytes(fields: dict[str, str], name: str) -> int:
    """A field such as `7 kB`, in bytes; 0 where there is none."""
    words = fields.get(name, "").split()
    return int(words[0]) << 10 if words else 0


def meminfo() -> dict[str, str]:
    lines = (PROC / "meminfo").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def command_of(pid: int) -> str:
    """Its command line, empty where that can not be read."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def descriptors(pid: int) -> dict[int, str]:
    """What each open descriptor is."""
    found = {}
    with contextlib.suppress(OSError):
        for path in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                found[int(path.name)] = os.readlink(path)
    return found


def descriptor_limit(pid: int) -> int:
    """How many descriptors a process may open; 0 where that can not be read."""
    with contextlib.suppress(OSError):
        text = (PROC / str(pid) / "limits").read_text()
        if found := re.search(r"Max open files\s+(\d+)", text):
            return int(found[1])
    return 0


def listeners() -> list[Listener]:
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS:
                    address, _, port = fields[1].partition(":")
                    found.append(Listener(address, int(port, 16), int(fields[9])))
    return found


def holder_of(inode: int) -> int | None:
    """The process that has a socket open; None where it is none that can be looked at."""
    wanted = f"socket:[{inode}]"
    return next((pid for pid in pids() if wanted in descriptors(pid).values()), None)


def ring_readers(loader: int) -> list[int]:
    """Other processes that have mapped a loader's rings: its ranks with shared memory."""
    rings = {number for number, name in descriptors(loader).items() if name.startswith(f"/{RING}")}
    inodes = set()
    for number in rings:
        with contextlib.suppress(OSError):
            inodes.add((PROC / str(loader) / "fd" / str(number)).stat().st_ino)
    return [pid for pid in pids() if pid != loader and inodes & set(_mapped_rings(pid))] if inodes else []


def _mapped_rings(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "maps").read_text().splitlines():
            if RING in line:
                yield int(line.split()[4])


def cgroup_memory() -> tuple[int, int] | None:
    """Limit and use, in bytes, of the control group of this process that leaves least; None where none has a limit."""
    found = [limit for root, most, used in CGROUPS for limit in _limits(Path(root), most, used)]
    return min(found, key=lambda each: each[0] - each[1], default=None)


def _limits(root: Path, most: str, used: str) -> Iterator[tuple[int, int]]:
    """Of this process's group and those above it."""
    for group in _groups(root):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limit, use = (int((group / name).read_text()) for name in (most, used))
            if limit < NO_LIMIT:
                yield limit, use


def _groups(root: Path) -> Iterator[Path]:
    controller = "memory" if root.name == "memory" else ""
    own = root
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            own = root / path.lstrip("/")
    yield from (group for group in (own, *own.parents) if group == root or root in group.parents)
