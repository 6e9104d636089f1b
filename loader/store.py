"""`Store`: local copies of the parts of a set, made ahead of their use by threads, within a limit of bytes.

The limit holds for all processes of the machine that use the same folder together (`copies` keeps the account); of
those who want the same part one makes it. What is wanted and not used yet is kept; beyond the limit making ahead waits
until something is let go of, and what is needed sooner goes before what is needed later (`agenda`).

Takes parts as a name, a size and a function that makes a file; gives paths of whole files. Knows nothing of storages or
formats. It belongs to the process that opened it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seqmesh.loader.agenda import Agenda, Held
from seqmesh.loader.copies import Copies, check_name, touch
from seqmesh.loader.errors import LoaderError, LoaderTimeoutError, StoreError

POLL_SECONDS = 0.1  # how soon what another process does is noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A part that copies can be kept of. name: of the copy, another one for other content; size: bytes that it takes
    at most; make: writes it to the path that it is given, in any thread."""

    name: str
    size: int
    make: Callable[[Path], None]


@dataclass(slots=True)
class StoreCounters:
    """fetched, fetched_bytes: copies made here; hits: those that were there already; evicted: removed for others;
    failures; waited_seconds: in `wait`."""

    fetched: int = 0
    fetched_bytes: int = 0
    hits: int = 0
    evicted: int = 0
    failures: int = 0
    waited_seconds: float = 0.0


@dataclass(slots=True)
class _Watch:
    """Of another process that makes a part: bytes it has made, and since when it has no more."""

    made: int
    since: float


class Store:
    """Copies by the number of their part. Thread-safe. What neither `want` nor `wait` asks for is not made. A copy is
    held, that is, no process removes it, from when it is here until `let_go`, or until it is no longer wanted and
    nobody has its path."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        parts: Sequence[Keep],
        threads: int = 4,
        deadline: float = 60.0,
        pause: float = 5.0,
    ) -> None:
        """limit: bytes; deadline: seconds until a lack of room for what is needed, or another process that makes a part
        and gets nowhere, is a failure; pause: seconds until what failed may be tried again. Raises ValueError for parts
        that can not be kept, OSError for a folder that can not be written."""
        _check(parts, limit, threads)
        self._parts, self._deadline, self._pause = tuple(parts), deadline, pause
        self._copies = Copies(folder, limit, deadline)
        self._process = os.getpid()
        self._changed = threading.Condition()  # guards what follows
        self._closed = False
        self._agenda = Agenda()
        self._counters = StoreCounters()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for _ in range(threads):
            threading.Thread(target=self._work, name="seqmesh-store", daemon=True).start()

    @property
    def limit(self) -> int:
        """Bytes."""
        return self._copies.limit

    @property
    def counters(self) -> StoreCounters:
        """What was done so far."""
        with self._changed:
            return replace(self._counters, evicted=self._copies.evicted)

    def want(self, numbers: Iterable[int]) -> None:
        """Make these, the first most urgently, instead of what was wanted before and is not begun. What failed is tried
        again once the pause is over."""
        with self._changed:
            self._check_open()
            self._plan(list(numbers))

    def path(self, number: int) -> Path | None:
        """The copy of a part, which is held until `let_go`, however often it was asked for; None where it is not here
        yet."""
        with self._changed:
            self._check_open()
            name, held = self._parts[number].name, self._agenda.held
            if number not in held and (descriptor := self._copies.hold(name)) is not None:
                self._hold(number, descriptor)
                self._counters.hits += 1
            if number not in held:
                self._agenda.missed.setdefault(number, time.monotonic())
                return None
            held[number].used = True
            touch(held[number].descriptor)
            return self._copies.path(name)

    def let_go(self, number: int) -> None:
        """A part was used; its copy may be removed. It is not wanted any more, unless it is wanted again."""
        with self._changed:
            self._agenda.rank.pop(number, None)
            self._agenda.missed.pop(number, None)
            self._drop(number)
            self._changed.notify_all()

    def failure(self, number: int) -> Exception | None:
        """Why a part could not be made, until it is tried again."""
        with self._changed:
            return self._agenda.failed.get(number, (None, 0.0))[0]

    def wait(self, numbers: Iterable[int], timeout: float) -> None:
        """Return once all of these are here; they are wanted before all else. Raises what failed, StoreError at once
        where what this process uses leaves no room for them, LoaderTimeoutError."""
        needed, began = list(dict.fromkeys(numbers)), time.monotonic()
        with self._changed:
            self._check_open()
            agenda = self._agenda
            self._plan([*needed, *agenda.rank])
            agenda.awaited.update(needed)
            agenda.missed.update({n: began for n in needed if n not in agenda.held and n not in agenda.missed})
            ended = self._changed.wait_for(lambda: self._closed or agenda.is_over(needed), timeout)
            agenda.awaited.difference_update(needed)
            self._counters.waited_seconds += time.monotonic() - began
            self._check_open()
            for number in needed:
                if number in agenda.failed:
                    raise agenda.failed[number][0]
            if not ended:
                missing = [self._parts[number].name for number in needed if number not in agenda.held]
                raise LoaderTimeoutError(f"{', '.join(missing)}: not here after {timeout:g} s; the storage is too slow")

    def drain(self) -> None:
        """Make `descriptor` unreadable until something comes or fails again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Let go of all. Threads end when what they are making is made."""
        with self._changed:
            if not self._closed:
                self._closed = True
                for number in list(self._agenda.held):
                    self._drop(number)
                os.close(self.descriptor)
                self._changed.notify_all()

    # Up to `_work` all has the lock.

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderError("the store of local copies is closed")
        if os.getpid() != self._process:
            raise LoaderError("the store of local copies was opened in another process; open one in this one")

    def _plan(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if not 0 <= number < len(self._parts):
                raise IndexError(f"part {number} is wanted: there are {len(self._parts)}")
        for number in self._agenda.plan(numbers, retry_before=time.monotonic() - self._pause):
            self._drop(number)
        self._changed.notify_all()

    def _hold(self, number: int, descriptor: int) -> None:
        self._agenda.held[number] = Held(descriptor, os.fstat(descriptor).st_size)
        self._agenda.missed.pop(number, None)

    def _drop(self, number: int) -> None:
        if number in self._agenda.held:
            os.close(self._agenda.held.pop(number).descriptor)

    def _settle(self, number: int, descriptor: int | None, failure: Exception | None) -> None:
        """A thread is done with a part: it is here, or failed, or (neither) is to be brought later, if at all."""
        agenda = self._agenda
        agenda.busy.discard(number)
        agenda.line.discard(number)
        if descriptor is not None and (self._closed or number not in agenda.rank or number in agenda.held):
            os.close(descriptor)
        elif descriptor is not None:
            self._hold(number, descriptor)
        if failure:
            agenda.failed[number] = (failure, time.monotonic())
            agenda.missed.pop(number, None)
            self._counters.failures += 1
        if not self._closed and (failure or descriptor is not None):
            os.eventfd_write(self.descriptor, 1)
        self._changed.notify_all()

    def _give_up_for(self, number: int) -> bool:
        """Whether a copy was let go of that is needed later than a part there is no room for. Raises StoreError where
        that part is needed and will get none."""
        other = self._agenda.least_urgent(number)
        if other is not None:
            self._drop(other)
            return True
        keep, ours = self._parts[number], self._agenda.in_the_way(number)
        stuck = number in self._agenda.awaited and sum(ours) + keep.size > self._copies.limit
        if stuck or self._agenda.missed_for(number, time.monotonic()) > self._deadline:
            raise StoreError(
                f"{self._copies.folder} has no room for {keep.name}, which takes {keep.size} bytes: the limit is "
                f"{self._copies.limit}, {self._copies.taken()} are taken, {sum(ours)} of them by {len(ours)} copies "
                "that this process uses; raise the limit, or give jobs folders of their own"
            )
        return False

    # From here on: in the threads, without the lock.

    def _work(self) -> None:
        while (number := self._take()) is not None:
            descriptor, failure = None, None
            try:
                descriptor = self._bring(number)
            except Exception as error:
                failure = error
            with self._changed:
                self._settle(number, descriptor, failure)

    def _take(self) -> int | None:
        """What to bring next; None once the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._agenda.next() is not None)
            number = None if self._closed else self._agenda.next()
            if number is not None:
                self._agenda.busy.add(number)
                self._agenda.line.add(number)
            return number

    def _bring(self, number: int) -> int | None:
        """A descriptor that holds the copy, once it is here; None where something else is to be done first."""
        watch = _Watch(-1, time.monotonic())
        while (descriptor := self._attempt(number, watch)) is None:
            with self._changed:
                self._changed.wait(POLL_SECONDS)
                if self._closed or not self._agenda.goes_on(number):
                    return None
        return descriptor

    def _attempt(self, number: int, watch: _Watch) -> int | None:
        """Find the copy, or make it; None while another process makes it, or there is no room."""
        keep = self._parts[number]
        with self._copies.making(keep.name) as ours:
            if not ours:
                self._leave_line(number)
                self._check_progress(keep, watch)
                return None
            if (descriptor := self._copies.find(keep.name)) is not None:
                with self._changed:
                    self._counters.hits += 1
                return descriptor
            path = self._reserve(number)
            return None if path is None else self._make(keep, path)

    def _check_progress(self, keep: Keep, watch: _Watch) -> None:
        """Raises LoaderTimeoutError where another process makes a part, and gets nowhere."""
        made, now = self._copies.made(keep.name), time.monotonic()
        if made != watch.made:
            watch.made, watch.since = made, now
        if now - watch.since > self._deadline:
            raise LoaderTimeoutError(
                f"{keep.name}: another process is making it in {self._copies.folder}, but has got nowhere for "
                f"{self._deadline:g} s; let it go on, or end it"
            )

    def _reserve(self, number: int) -> Path | None:
        """Where to make a part; None while there is no room, or something more urgent waits for it."""
        keep = self._parts[number]
        with self._changed:
            self._agenda.line.add(number)
            if not self._agenda.is_first_in_line(number):
                return None
        while (path := self._copies.reserve(keep.name, keep.size)) is None:
            with self._changed:
                if not self._give_up_for(number):
                    return None
        self._leave_line(number)
        return path

    def _leave_line(self, number: int) -> None:
        with self._changed:
            if number in self._agenda.line:
                self._agenda.line.remove(number)
                self._changed.notify_all()

    def _make(self, keep: Keep, path: Path) -> int:
        try:
            keep.make(path)
            size = path.stat().st_size
            if size > keep.size:
                raise StoreError(f"{keep.name} takes {size} bytes: at most {keep.size} were announced")
            descriptor = self._copies.publish(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreError(
                f"{self._copies.folder}: the disk is full: {keep.name} takes {keep.size} bytes; make room there, or "
                f"lower the limit, which is {self._copies.limit} bytes"
            ) from error
        finally:
            self._copies.discard(path)
        with self._changed:
            self._counters.fetched += 1
            self._counters.fetched_bytes += size
        return descriptor


def _check(parts: Sequence[Keep], limit: int, threads: int) -> None:
    if threads < 1:
        raise ValueError(f"threads is {threads}: must be at least 1")
    for part in parts:
        check_name(part.name)
        if not 0 <= part.size <= limit:
            raise ValueError(
                f"{part.name} takes {part.size} bytes: the limit of local copies is {limit} bytes; raise the limit, or "
                "prepare smaller parts"
            )
