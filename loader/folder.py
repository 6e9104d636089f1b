"""The private folder of a loader process: its socket and its log, in a place that only this user can enter.

It has a random name and says who owns it. The owner removes it, or the loader where the owner was killed; where both
were, the next loader of this user does, or `seqmesh doctor --clean`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PREFIX = "seqmesh-"
OWNER = "owner"  # file: the namespace of process ids, the owner's, and when that process began

State = Literal["living", "dead", "unknown"]


@dataclass(frozen=True, slots=True)
class Process:
    """A process for certain: an id alone may be another process's by now. namespace: of process ids; a container that
    shares a place does not see our processes, nor we its. began: in ticks since the machine did."""

    namespace: str
    pid: int
    began: str

    @classmethod
    def this(cls) -> Process:
        return cls(_namespace(), os.getpid(), _began(os.getpid()))

    @property
    def state(self) -> State:
        if self.namespace != _namespace():
            return "unknown"
        return "living" if _began(self.pid) == self.began else "dead"


def runtime_place() -> Path:
    """Where private folders are: the user's runtime folder where there is one, else the place of temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir())


def private_folder() -> Path:
    """A new folder (mode 0700) in `runtime_place`. Removes those whose owners are gone."""
    place, this = runtime_place(), Process.this()
    remove_orphans(place)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    (folder / OWNER).write_text(f"{this.namespace} {this.pid} {this.began}")
    return folder


def private_folders(place: Path) -> Iterator[tuple[Path, Process]]:
    """The private folders of this user in a place, and who owns each. One whose owner can not be told is left out."""
    for folder in sorted(place.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, ValueError):
            namespace, pid, began = (folder / OWNER).read_text().split()
            if folder.stat(follow_symlinks=False).st_uid == os.geteuid():
                yield folder, Process(namespace, int(pid), began)


def remove_orphans(place: Path) -> None:
    """Remove private folders of processes that have ended."""
    for folder, owner in private_folders(place):
        if owner.state == "dead":
            shutil.rmtree(folder, ignore_errors=True)


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
