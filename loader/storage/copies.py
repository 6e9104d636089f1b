"""The folder of local copies on the disk: what is there, who holds it, what has to go when room is needed.

All processes of a machine that use the same folder keep one account of it, with a lock around it. Names in it:

* `NAME`: a whole copy. Who reads it has a shared lock on it, which ends with the process, in whatever way. When it was
  last used is its time of change.
* `NAME.BYTES.tmp/`: a copy in the making, for which so many bytes are reserved.
* `NAME.lock`: is locked by who makes that copy. A copy in the making whose lock is free is a dead process's.
* `.claim.lock`: is locked, each by a shared lock, by those who need room now. Nobody makes copies ahead meanwhile, so
  that a process which reads ahead a lot does not take all room from the others.

Only the folder `seqmesh-copies` below the one that is given is ever touched. No threads here: those are `store`'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
from filelock import FileLock

from seqmesh.loader.errors import LoaderTimeoutError
from seqmesh.loader.files import sync_file

FOLDER = "seqmesh-copies"
MAKING, LOCK = ".tmp", ".lock"
MAX_NAME = 200  # characters; file systems take 255 bytes, of which our endings need some


@dataclass(frozen=True, slots=True)
class Copy:
    """A whole copy: bytes, and when it was last used (ns)."""

    name: str
    size: int
    used: int


def check_name(name: str) -> None:
    """Raises ValueError for one that can not be a copy's."""
    if name[:1] in ("", ".") or "/" in name or len(name) > MAX_NAME or name.endswith((MAKING, LOCK)):
        raise ValueError(
            f"{name!r} can not be the name of a copy: must be a plain file name of at most {MAX_NAME} characters that "
            f"begins with no dot and ends neither in {MAKING} nor in {LOCK}"
        )


def victims(copies: Iterable[Copy], excess: int, take: Callable[[Copy], bool]) -> list[Copy] | None:
    """Which copies go so that at least `excess` bytes are free: those not used for longest, of those that can be
    taken. None where even all of them are not enough."""
    taken = []
    for copy in sorted(copies, key=lambda copy: (copy.used, copy.name)):
        if excess <= 0:
            break
        if take(copy):
            taken.append(copy)
            excess -= copy.size
    return taken if excess <= 0 else None


class Copies:
    """The copies in a folder, at most `limit` bytes of them, those in the making included."""

    def __init__(self, folder: Path, limit: int, timeout: float) -> None:
        """timeout: seconds that the account's lock is waited for. Raises OSError where there can be no such folder."""
        self.folder, self.limit, self.evicted = folder / FOLDER, limit, 0
        self._timeout = timeout
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._account():
            self._remove_dead()

    def path(self, name: str) -> Path:
        return self.folder / name

    def hold(self, name: str) -> int | None:
        """A descriptor that keeps a copy from being removed, and marks it as used; None where there is no copy."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if not _lock(descriptor, fcntl.LOCK_SH) or not os.fstat(descriptor).st_nlink:  # it is being removed, or was
            os.close(descriptor)
            return None
        touch(descriptor)
        return descriptor

    def find(self, name: str) -> int | None:
        """As `hold`, for certain: `hold` may miss a copy that somebody thought of removing just then."""
        with self._account():
            return self.hold(name)

    @contextlib.contextmanager
    def making(self, name: str) -> Iterator[bool]:
        """Whether this thread may make a copy, and nobody else until the end of the block; never waits."""
        lock = FileLock(self.path(name + LOCK), blocking=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            ours = False
        else:
            ours = True
        try:
            yield ours
        finally:
            lock.release()

    def made(self, name: str) -> int:
        """Bytes that there are so far of a copy in the making."""
        with contextlib.suppress(FileNotFoundError):  # it is whole just now
            return sum(entry.stat().st_size for folder in self._unfinished(name) for entry in os.scandir(folder))
        return 0

    def reserve(self, name: str, size: int) -> Path | None:
        """Where to make a copy, once there is room for it, for which others are removed; None where there is none.
        Whoever asks has the lock of `making`. Raises LoaderTimeoutError where the account is locked for too long."""
        with self._account():
            for leftover in self._unfinished(name):
                shutil.rmtree(leftover)
            self._remove_dead()
            if not self._make_room(size):
                return None
            folder = self.path(f"{name}.{size}{MAKING}")
            folder.mkdir()
            return folder / name

    def publish(self, made: Path) -> int:
        """Let a copy appear that was made at a path from `reserve`; a descriptor that holds it."""
        sync_file(made)
        descriptor = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        _lock(descriptor, fcntl.LOCK_SH)
        made.replace(self.path(made.name))
        return descriptor

    def adopt(self, name: str, made: Path) -> bool:
        """Let a copy appear that was made elsewhere on the same disk, if there is room without removing any."""
        with self._account():
            there_is_room = self.taken() + made.stat().st_size <= self.limit
            if there_is_room:
                made.replace(self.path(name))
            return there_is_room

    def discard(self, made: Path) -> None:
        """Give back what was reserved at a path from `reserve`."""
        shutil.rmtree(made.parent, ignore_errors=True)

    def claim(self) -> int:
        """A descriptor that keeps others from making copies ahead until it is closed."""
        with self._account():
            descriptor = self._open_claim()
            _lock(descriptor, fcntl.LOCK_SH)
            return descriptor

    def is_claimed(self) -> bool:
        with self._account():
            descriptor = self._open_claim()
            is_free = _lock(descriptor, fcntl.LOCK_EX)
            release(descriptor)
            return not is_free

    def _open_claim(self) -> int:
        return os.open(self.folder / f".claim{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def taken(self) -> int:
        """Bytes of all copies, with what is reserved: first that, since one that appears meanwhile must count twice
        rather than not at all."""
        reserved = sum(_reserved(path) for path in self._unfinished())
        return reserved + sum(copy.size for copy in self._copies())

    def _make_room(self, size: int) -> bool:
        locked: list[int] = []
        try:
            going = victims(self._copies(), self.taken() + size - self.limit, lambda copy: self._seize(copy, locked))
            for copy in going or ():
                self.path(copy.name).unlink(missing_ok=True)
            self.evicted += len(going or ())
            return going is not None
        finally:
            for descriptor in locked:
                release(descriptor)

    def _seize(self, copy: Copy, locked: list[int]) -> bool:
        """Whether nobody holds a copy; then nobody can, for as long as the descriptor is open."""
        try:
            descriptor = os.open(self.path(copy.name), os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's
            return False
        if not _lock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return False
        locked.append(descriptor)
        return True

    def _copies(self) -> list[Copy]:
        found = []
        for entry in os.scandir(self.folder):
            if not entry.name.startswith(".") and not entry.name.endswith((MAKING, LOCK)):
                with contextlib.suppress(FileNotFoundError):  # removed just now
                    stat = entry.stat()
                    found.append(Copy(entry.name, stat.st_size, stat.st_mtime_ns))
        return found

    def _unfinished(self, name: str = "") -> Iterator[Path]:
        """Folders of copies in the making: of all, or of one name."""
        for entry in list(os.scandir(self.folder)):
            ours = entry.name.removesuffix(MAKING).rpartition(".")[2].isdigit() and entry.name.endswith(MAKING)
            if ours and (not name or name == _made_name(entry.name)):
                yield Path(entry.path)

    def _remove_dead(self) -> None:
        for path in self._unfinished():
            with self.making(_made_name(path.name)) as nobody_else:
                if nobody_else:
                    shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _account(self) -> Iterator[None]:
        lock = FileLock(self.folder / f".account{LOCK}", timeout=self._timeout, poll_interval=0.01)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise LoaderTimeoutError(
                f"{lock.lock_file}: another process has held it for over {self._timeout:g} s; let it go on, or end it"
            ) from None
        try:
            yield
        finally:
            lock.release()


def touch(descriptor: int) -> None:
    """Mark a copy as used just now."""
    now = time.time_ns()  # the kernel's own idea of now is milliseconds coarse
    with contextlib.suppress(PermissionError):  # another user's
        os.utime(descriptor, ns=(now, now))


def release(descriptor: int) -> None:
    """Let go of what `hold`, `find`, `publish` or `claim` gave, also where a forked process has it, too."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _made_name(entry: str) -> str:
    return entry.removesuffix(MAKING).rpartition(".")[0]


def _reserved(path: Path) -> int:
    return int(path.name.removesuffix(MAKING).rpartition(".")[2])
