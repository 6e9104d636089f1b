"""Files that are built once, where several processes want the same one: an index beside a set, say.

The file appears under its name when it is whole, by a rename, so that nobody reads a part of it, on a disk of this
machine or on one that is shared. One process builds while the others wait; a builder that is killed blocks nobody. On a
shared disk without locks, or whose locks do not reach other machines, several may build, each for itself, and the last
one's stays.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
from filelock import FileLock

from seqmesh.loader.errors import LoaderTimeoutError
from seqmesh.loader.files import atomic_path
from seqmesh.loader.machine import machine as _machine


def built_once(path: Path, build: Callable[[Path], None], timeout: float = 600.0) -> Path:
    """`path`, once it is there: `build` writes it to the path that it is given, unless another process does.

    timeout: seconds that another's building is waited for. Raises LoaderTimeoutError after them, what `build` raises
    (nothing is left then, and the next who wants the file builds), OSError.
    """
    if not path.exists():
        with _alone(path, timeout) as is_locked:
            if not _is_listed(path):
                if is_locked:
                    _remove_leftovers(path)
                with atomic_path(path, mark=f"{_machine()}-{secrets.token_hex(8)}") as temporary:
                    build(temporary)
    return path


@contextmanager
def _alone(path: Path, timeout: float) -> Iterator[bool]:
    """Whether nobody else is in here; not on a disk that has no locks."""
    lock = FileLock(f"{path}.lock", timeout=timeout)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise LoaderTimeoutError(
            f"{path}: another process has been building it for over {timeout:g} s; wait for it, or end it"
        ) from None
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _is_listed(path: Path) -> bool:
    """Whether the file is there by now. A network file system remembers for a while that it was not; opening the
    folder makes it look again."""
    with os.scandir(path.parent) as entries:
        return any(entry.name == path.name for entry in entries)


def _remove_leftovers(path: Path) -> None:
    """Of builders on this machine, which are dead: the lock is ours. Another machine's may be alive where locks do not
    reach."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.{_machine()}-*.tmp"):
        leftover.unlink(missing_ok=True)
