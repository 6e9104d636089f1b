"""What loaders that were killed have left: private folders, and the sockets of endpoints that their users had named.

Only what a dead process of this user left, for certain, is a leftover: nothing of a living one, of another user, or of
a container that has processes of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from seqmesh.loader.endpoint import claim_of
from seqmesh.loader.folder import private_folders
from seqmesh.loader.handover import handover_path
from seqmesh.loader.registry import entries


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder or a socket. endpoint: of the socket, empty for a folder. size: bytes on the disk, with all in it."""

    path: Path
    pid: int
    size: int
    endpoint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"path": str(self.path), "pid": self.pid, "size": self.size, "endpoint": self.endpoint}


def find_leftovers(places: Iterable[Path]) -> list[Leftover]:
    """Of this user, in the places of private folders. The sockets come first: the folders tell of them."""
    places = list(places)
    sockets = [each for place in places for each in _sockets(place)]
    folders = [
        Leftover(folder, owner.pid, _size(folder))
        for place in places
        for folder, owner in private_folders(place)
        if owner.state == "dead"
    ]
    return sockets + folders


def remove(leftover: Leftover) -> bool:
    """Whether it is gone; not where somebody listens at the endpoint by now, or the folder has been taken over."""
    if not leftover.endpoint:
        owners = dict(private_folders(leftover.path.parent))
        if leftover.path in owners and owners[leftover.path].state == "dead":
            shutil.rmtree(leftover.path, ignore_errors=True)
        return not leftover.path.exists()
    claim = claim_of(leftover.endpoint)
    assert claim is not None
    with contextlib.suppress(filelock.Timeout, OSError), claim.acquire(blocking=False):
        if not is_listening(leftover.endpoint.removeprefix("ipc://")):
            leftover.path.unlink(missing_ok=True)
    return not leftover.path.exists()


def is_listening(path: str) -> bool:
    """Whether a process listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _sockets(place: Path) -> Iterator[Leftover]:
    """Of loaders that were killed at an endpoint outside of their private folder. The file of the endpoint's lock
    stays: it is empty, and whoever waits for it would wait for another one than the next loader takes."""
    for folder, entry in entries(place):
        path = Path(entry.endpoint.removeprefix("ipc://"))
        if entry.process.state != "dead" or not entry.endpoint.startswith("ipc://") or path.parent == folder:
            continue
        if not is_listening(str(path)):  # nobody has taken its place
            for each in (path, Path(handover_path(entry.endpoint))):
                with contextlib.suppress(OSError):
                    yield Leftover(each, entry.process.pid, each.lstat().st_size, entry.endpoint)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
