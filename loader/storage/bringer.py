"""How one part becomes a local copy: found, or made, by one process of those that want it, once there is room.

These are the steps that a thread of `store` takes, between which it asks the `agenda` whether they are still the right
ones. The agenda and the counters belong to the store, whose lock is `changed`.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seqmesh.loader.errors import LoaderTimeoutError, StoreError
from seqmesh.loader.storage.agenda import Agenda
from seqmesh.loader.storage.copies import Copies, release

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
class _Turn:
    """Of a thread that brings a part. made: bytes of it that another process has made, since: when that were less;
    claim: a descriptor, where it is in need of room."""

    made: int
    since: float
    claim: int | None = None

    def end_claim(self) -> None:
        if self.claim is not None:
            release(self.claim)
            self.claim = None


@dataclass(frozen=True, slots=True)
class Bringer:
    """deadline: seconds until a lack of room for what is needed, or another process that makes a part and gets nowhere,
    is a failure."""

    parts: Sequence[Keep]
    copies: Copies
    deadline: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    agenda: Agenda = field(default_factory=Agenda)
    counters: StoreCounters = field(default_factory=StoreCounters)

    def bring(self, number: int) -> int | None:
        """A descriptor that holds the copy, once it is here; None where something else is to be done first."""
        turn = _Turn(-1, time.monotonic())
        try:
            while (descriptor := self._attempt(number, turn)) is None:
                with self.changed:
                    self.changed.wait(POLL_SECONDS)
                    if not self.agenda.goes_on(number):
                        return None
            return descriptor
        finally:
            turn.end_claim()

    def _attempt(self, number: int, turn: _Turn) -> int | None:
        """Find the copy, or make it; None while another process makes it, or there is no room."""
        keep = self.parts[number]
        with self.copies.making(keep.name) as ours:
            if not ours:
                self._leave_line(number)
                self._check_progress(keep, turn)
                return None
            if (descriptor := self.copies.find(keep.name)) is not None:
                with self.changed:
                    self.counters.hits += 1
                return descriptor
            path = self._reserve(number, turn)
            return None if path is None else self._make(keep, path)

    def _check_progress(self, keep: Keep, turn: _Turn) -> None:
        """Raises LoaderTimeoutError where another process makes a part, and gets nowhere."""
        made, now = self.copies.made(keep.name), time.monotonic()
        if made != turn.made:
            turn.made, turn.since = made, now
        if now - turn.since > self.deadline:
            raise LoaderTimeoutError(
                f"{keep.name}: another process is making it in {self.copies.folder}, but has got nowhere for "
                f"{self.deadline:g} s; let it go on, or end it"
            )

    def _reserve(self, number: int, turn: _Turn) -> Path | None:
        """Where to make a part; None while there is no room, or it is for what is needed sooner, here or elsewhere."""
        keep = self.parts[number]
        with self.changed:
            self.agenda.line.add(number)
            is_missed = number in self.agenda.missed
            if not self.agenda.is_first_in_line(number):
                return None
        if not is_missed and self.copies.is_claimed():
            return None
        while (path := self.copies.reserve(keep.name, keep.size)) is None:
            with self.changed:
                if self._give_up_for(number):
                    continue
            if is_missed and turn.claim is None:
                turn.claim = self.copies.claim()
            return None
        turn.end_claim()
        self._leave_line(number)
        return path

    def _leave_line(self, number: int) -> None:
        with self.changed:
            if number in self.agenda.line:
                self.agenda.line.remove(number)
                self.changed.notify_all()

    def _make(self, keep: Keep, path: Path) -> int:
        try:
            keep.make(path)
            size = path.stat().st_size
            if size > keep.size:
                raise StoreError(f"{keep.name} takes {size} bytes: at most {keep.size} were announced")
            descriptor = self.copies.publish(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreError(
                f"{self.copies.folder}: the disk is full: {keep.name} takes {keep.size} bytes; make room there, or "
                f"lower the limit, which is {self.copies.limit} bytes"
            ) from error
        finally:
            self.copies.discard(path)
        with self.changed:
            self.counters.fetched += 1
            self.counters.fetched_bytes += size
        return descriptor

    def _give_up_for(self, number: int) -> bool:
        """Whether a copy was let go of that is needed later than a part there is no room for. Raises StoreError where
        that part is needed and will get none."""
        other = self.agenda.least_urgent(number)
        if other is not None:
            self.agenda.drop(other)
            return True
        keep, ours = self.parts[number], self.agenda.in_the_way(number)
        stuck = number in self.agenda.awaited and sum(ours) + keep.size > self.copies.limit
        if stuck or self.agenda.missed_for(number, time.monotonic()) > self.deadline:
            raise StoreError(
                f"{self.copies.folder} has no room for {keep.name}, which takes {keep.size} bytes: the limit is "
                f"{self.copies.limit}, {self.copies.taken()} are taken, {sum(ours)} of them by {len(ours)} copies "
                "that this process uses; raise the limit, or give jobs folders of their own"
            )
        return False
