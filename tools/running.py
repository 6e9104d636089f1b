"""The loaders that run on this machine: those that left their file (see `loader.registry`) and live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqmesh.loader.registry import Entry, entries
from seqmesh.tools import procfs
from seqmesh.tools.leftovers import is_listening


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLoader:
    """resident, shared: bytes of memory, and how many of them are rings. readers: processes that have mapped a ring.
    stopped: by a signal. listens: at its endpoint. open_files, most_files: descriptors in use, and the limit."""

    entry: Entry
    folder: Path
    resident: int
    shared: int
    readers: list[int]
    stopped: bool
    listens: bool
    open_files: int
    most_files: int

    @property
    def pid(self) -> int:
        return self.entry.process.pid

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        entry = self.entry
        return {
            "pid": self.pid,
            "since": entry.since.isoformat(),
            "endpoint": entry.endpoint,
            "data": entry.data,
            "ranks": entry.ranks,
            "metrics": entry.options.metrics,
            "ledger": entry.options.ledger,
            "folder": str(self.folder),
            "resident_bytes": self.resident,
            "shared_bytes": self.shared,
            "readers": self.readers,
            "stopped": self.stopped,
            "listens": self.listens,
            "open_files": self.open_files,
        }


def find_running(places: Iterable[Path]) -> list[RunningLoader]:
    """Of this user, in the places of private folders."""
    listeners = procfs.listeners()
    found = (each for place in places for each in entries(place))
    return [_looked_at(folder, entry, listeners) for folder, entry in found if entry.process.state == "living"]


def _looked_at(folder: Path, entry: Entry, listeners: list[procfs.Listener]) -> RunningLoader:
    pid = entry.process.pid
    status, descriptors = procfs.status(pid), procfs.descriptors(pid)
    return RunningLoader(
        entry=entry,
        folder=folder,
        resident=procfs.kilobytes(status, "VmRSS"),
        shared=procfs.kilobytes(status, "RssShmem"),
        readers=procfs.ring_readers(pid),
        stopped=status.get("State", "").startswith("T"),
        listens=_listens(entry.endpoint, set(descriptors.values()), listeners),
        open_files=len(descriptors),
        most_files=procfs.descriptor_limit(pid),
    )


def _listens(endpoint: str, descriptors: set[str], listeners: list[procfs.Listener]) -> bool:
    """Whether a process with these descriptors listens at a tcp endpoint, or anybody at an ipc one."""
    if endpoint.startswith("ipc://"):
        return is_listening(endpoint.removeprefix("ipc://"))
    port = int(endpoint.rpartition(":")[2])
    return any(each.port == port and f"socket:[{each.inode}]" in descriptors for each in listeners)
