"""Whether this machine is fit for loaders: memory, shared memory, descriptors, folders, ports, versions."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from seqmesh.loader.folder import PREFIX, runtime_place
from seqmesh.loader.handover import check_length
from seqmesh.tools import procfs
from seqmesh.tools.running import RunningLoader

SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY = 64 << 20  # what containers get by default
RING = 64 << 20  # a rank's, by default
LITTLE_MEMORY = 1 << 30
FEW_FILES, TOO_FEW_FILES = 1024, 256
PACKAGES = ("seqmesh", "numpy", "numba", "pyarrow", "pyzmq", "torch")
NAME_BYTES = 8  # that a private folder's name has after its prefix

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was looked at. advice: what to do; empty where all is well."""

    check: str
    level: Level
    found: str
    advice: str = ""


def places() -> list[Path]:
    """Where loaders of this user make their private folders, in whatever environment they were started."""
    return list(dict.fromkeys((runtime_place(), Path(tempfile.gettempdir()))))


def check_machine() -> Iterator[Finding]:
    yield check_versions()
    yield check_cache()
    yield check_memory()
    yield from check_cgroup(procfs.cgroup_memory())
    yield check_shared_memory(SHARED_MEMORY)
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_place(runtime_place())


def check_versions() -> Finding:
    found = {name: _version_of(name) for name in PACKAGES}
    words = ", ".join(f"{name} {number or '-'}" for name, number in found.items())
    python = ".".join(map(str, sys.version_info[:3]))
    return Finding("versions", "ok", f"Python {python}, {words}")


def check_cache() -> Finding:
    """Where compiled routines are kept."""
    from seqmesh.packer.permute import permute

    folder = Path(permute.stats.cache_path)  # type: ignore[attr-defined]  # of numba's dispatcher
    writable = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    if not os.access(writable, os.W_OK):
        advice = "set NUMBA_CACHE_DIR to a folder that can be written, or every start compiles for half a minute"
        return Finding("compiled routines", "problem", f"{folder} can not be written", advice)
    if folder.is_relative_to(tempfile.gettempdir()):
        advice = "set NUMBA_CACHE_DIR to a folder that stays, or they are compiled again after it is emptied"
        return Finding("compiled routines", "warning", f"kept in {folder}, with temporary files", advice)
    return Finding("compiled routines", "ok", f"kept in {folder}")


def check_memory() -> Finding:
    fields = procfs.meminfo()
    available, total = (procfs.kilobytes(fields, name) for name in ("MemAvailable", "MemTotal"))
    return _memory("memory", available, f"{size(available)} of {size(total)} are available")


def check_cgroup(found: tuple[int, int] | None) -> Iterator[Finding]:
    """found: limit and use of the control group. Rings count as memory of whoever wrote to them: the loader."""
    if found is not None:
        limit, used = found
        words = f"this container may use {size(limit)}, and uses {size(used)} (files that are kept in memory included)"
        yield Finding("memory limit", "ok" if limit >= LITTLE_MEMORY else "warning", words)


def _memory(check: str, available: int, words: str) -> Finding:
    if available < RING:
        advice = f"a rank's ring takes {size(RING)}: free some, or give less credit (credit_bytes)"
        return Finding(check, "problem", words, advice)
    if available < LITTLE_MEMORY:
        return Finding(check, "warning", words, f"a rank's ring takes {size(RING)}, or its credit_bytes")
    return Finding(check, "ok", words)


def check_shared_memory(path: Path) -> Finding:
    """It does not matter to loaders, but to what runs beside them."""
    try:
        space = os.statvfs(path)
    except OSError as error:
        return Finding("shared memory", "ok", f"{path}: {error.strerror}; rings do not need it")
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    words = f"{path} has {size(total)}, {size(free)} free; rings do not use it"
    if total <= SMALL_SHARED_MEMORY:
        advice = "others do, such as workers of torch's DataLoader: docker run --shm-size=8g, or an emptyDir in memory"
        return Finding("shared memory", "warning", words, advice)
    return Finding("shared memory", "ok", words)


def check_open_files(soft: int, hard: int) -> Finding:
    """A loader needs about 30 descriptors and 3 for each rank process; training needs more for each process group."""
    words = f"a process may open {_number(soft)}, and raise that to {_number(hard)}"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        level: Level = "problem" if soft < TOO_FEW_FILES else "warning"
        return Finding("open files", level, words, f"ulimit -n {FEW_FILES}, or LimitNOFILE= of the service")
    return Finding("open files", "ok", words)


def check_place(place: Path) -> Finding:
    """Where private folders are made."""
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("private folders", "problem", f"{place} can not be written", "set TMPDIR to a folder that can")
    try:
        check_length(f"ipc://{place / (PREFIX + 'x' * NAME_BYTES) / 'loader'}")
    except ValueError as error:
        return Finding("private folders", "problem", str(error), "set TMPDIR to a shorter one")
    return Finding("private folders", "ok", f"made in {place}")


def check_port(port: int, loaders: Sequence[RunningLoader]) -> Finding:
    """Whether a TCP port is free, or who listens there."""
    taken = [each for each in procfs.listeners() if each.port == port]
    if not taken:
        return Finding(f"port {port}", "ok", "free")
    holder = next((pid for each in taken if (pid := procfs.holder_of(each.inode)) is not None), None)
    if holder is None:
        return Finding(f"port {port}", "problem", "taken by a process of another user", "choose another port")
    whose = "a loader" if holder in {loader.pid for loader in loaders} else procfs.command_of(holder)
    return Finding(f"port {port}", "problem", f"taken by process {holder}: {whose}", "choose another port, or end it")


def size(count: int) -> str:
    """Bytes for people."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def _number(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
