"""The private folder of a loader process: its socket and its log, in a place that only this user can enter.

It has a random name and says who owns it. The owner removes it, or the loader where the owner was killed; where both
were, the next loader of this user does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "seqmesh-"
OWNER = "owner"  # file: the namespace of process ids, the owner's, and when that process began


def private_folder() -> Path:
    """A new folder (mode 0700) at the user's place for them. Removes those whose owners are gone."""
    remove_orphans(place := place_of_folders())
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    (folder / OWNER).write_text(f"{_namespace()} {os.getpid()} {_began(os.getpid())}")
    return folder


def place_of_folders() -> Path:
    """The user's runtime folder where there is one, else the place of temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime if runtime and os.access(runtime, os.W_OK) else tempfile.gettempdir())


def remove_orphans(place: Path) -> None:
    """Remove private folders of processes that have ended. One whose owner can not be told stays."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            namespace, pid, began = (folder / OWNER).read_text().split()
            ours = folder.stat().st_uid == os.geteuid() and namespace == _namespace()
            if ours and _began(int(pid)) != began:
                shutil.rmtree(folder, ignore_errors=True)


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty where there is none. A process id alone may be
    another process's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _namespace() -> str:
    """A container that shares the place does not see our processes, nor we its."""
    return os.readlink("/proc/self/ns/pid")
