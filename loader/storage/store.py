"""`Store`: local copies of the parts of a set, made ahead of their use by threads, within a limit of bytes.

The limit holds for all processes of the machine that use the same folder together (`copies` keeps the account); of
those who want the same part one makes it. What is wanted and not used yet is kept; beyond the limit making ahead waits
until something is let go of, and what is needed sooner goes before what is needed later (`agenda`).

Takes parts as a name, a size and a function that makes a file; gives paths of whole files. Knows nothing of storages or
formats. It belongs to the process that opened it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.storage.agenda import Held
from seqmesh.loader.storage.bringer import Bringer, Keep, StoreCounters
from seqmesh.loader.storage.copies import Copies, check_name, release, touch

__all__ = ["Keep", "Store", "StoreCounters"]


class Store:
    """Copies by the number of their part. Thread-safe. What neither `want` nor `wait` asks for is not made. A copy is
    held, that is, no process removes it, from when it is here until `let_go`, or until it is no longer wanted and
    nobody has its path. Each that is held is an open file."""

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
        self._parts, self._pause = tuple(parts), pause
        self._copies = Copies(folder, limit, deadline)
        self._bringer = Bringer(self._parts, self._copies, deadline)
        self._changed = self._bringer.changed  # guards the two that follow
        self._agenda, self._counters = self._bringer.agenda, self._bringer.counters
        self._process = os.getpid()
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
        with self._open():
            self._plan(list(numbers))

    def path(self, number: int) -> Path | None:
        """The copy of a part, which is held until `let_go`, however often it was asked for; None where it is not here
        yet."""
        with self._open():
            name, held = self._parts[number].name, self._agenda.held
            if number in held and not os.fstat(held[number].descriptor).st_nlink:
                self._agenda.drop(number)  # somebody emptied the folder
                self._changed.notify_all()
            if number not in held and (descriptor := self._copies.hold(name)) is not None:
                self._hold(number, descriptor)
                self._counters.hits += 1
            if number not in held:
                self._agenda.missed.setdefault(number, time.monotonic())
                self._changed.notify_all()
                return None
            held[number].used = True
            touch(held[number].descriptor)
            return self._copies.path(name)

    def let_go(self, number: int) -> None:
        """A part was used; its copy may be removed. It is not wanted any more, unless it is wanted again."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._agenda.rank.pop(number, None)
            self._agenda.missed.pop(number, None)
            self._agenda.drop(number)
            self._changed.notify_all()

    def failure(self, number: int) -> Exception | None:
        """Why a part could not be made, until the pause is over, after which `want` has it tried again."""
        with self._changed:
            error, when = self._agenda.failed.get(number, (None, 0.0))
            return error if time.monotonic() - when < self._pause else None

    def wait(self, numbers: Iterable[int], timeout: float) -> None:
        """Return once all of these are here; they are wanted before all else. Raises what failed, StoreError at once
        where what this process uses leaves no room for them, LoaderTimeoutError."""
        needed, began = list(dict.fromkeys(numbers)), time.monotonic()
        with self._open():
            agenda = self._agenda
            self._plan([*needed, *agenda.rank])
            agenda.awaited.update(needed)
            agenda.missed.update({n: began for n in needed if n not in agenda.held and n not in agenda.missed})
            try:
                ended = self._changed.wait_for(lambda: self._agenda.closed or agenda.is_over(needed), timeout)
            finally:
                agenda.awaited.difference_update(needed)
                self._counters.waited_seconds += time.monotonic() - began
            self._check_open()
            for number in needed:
                if number in agenda.failed:
                    raise agenda.failed[number][0]
            if not ended:
                missing = [self._parts[number].name for number in needed if number not in agenda.held]
                raise LoaderTimeoutError(f"{', '.join(missing)}: not here after {timeout:g} s; wait for longer")

    def drain(self) -> None:
        """Make `descriptor` unreadable until something comes or fails again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Let go of all. Threads end when what they are making is made."""
        if os.getpid() != self._process:  # a fork has neither the threads nor the lock they may have had
            return
        with self._changed:
            if not self._agenda.closed:
                self._agenda.closed = True
                for number in list(self._agenda.held):
                    self._agenda.drop(number)
                os.close(self.descriptor)
                self._changed.notify_all()

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """With the lock. Raises LoaderError where there are no threads."""
        if os.getpid() != self._process:  # whose lock may be that of a thread that is not here
            raise LoaderError("the store of local copies was opened in another process; open one in this one")
        with self._changed:
            self._check_open()
            yield

    # Up to `_work` all has the lock.

    def _check_open(self) -> None:
        if self._agenda.closed:
            raise LoaderError("the store of local copies is closed")

    def _plan(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if not 0 <= number < len(self._parts):
                raise IndexError(f"part {number} is wanted: there are {len(self._parts)}")
        self._agenda.plan(numbers, retry_before=time.monotonic() - self._pause)
        self._changed.notify_all()

    def _hold(self, number: int, descriptor: int) -> None:
        self._agenda.held[number] = Held(descriptor, os.fstat(descriptor).st_size)
        self._agenda.missed.pop(number, None)

    def _settle(self, number: int, descriptor: int | None, failure: Exception | None) -> None:
        """A thread is done with a part: it is here, or failed, or (neither) is to be brought later, if at all."""
        agenda = self._agenda
        agenda.busy.discard(number)
        agenda.line.discard(number)
        if descriptor is not None and (self._agenda.closed or number not in agenda.rank or number in agenda.held):
            release(descriptor)
        elif descriptor is not None:
            self._hold(number, descriptor)
        if failure:
            agenda.failed[number] = (failure, time.monotonic())
            agenda.missed.pop(number, None)
            self._counters.failures += 1
        if not self._agenda.closed and (failure or descriptor is not None):
            os.eventfd_write(self.descriptor, 1)
        self._changed.notify_all()

    # From here on: in the threads, without the lock.

    def _work(self) -> None:
        while (number := self._take()) is not None:
            descriptor, failure = None, None
            try:
                descriptor = self._bringer.bring(number)
            except Exception as error:
                failure = error
            with self._changed:
                self._settle(number, descriptor, failure)

    def _take(self) -> int | None:
        """What to bring next; None once the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._agenda.closed or self._agenda.next() is not None)
            number = self._agenda.next()
            if number is not None:
                self._agenda.busy.add(number)
                self._agenda.line.add(number)
            return number


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
