"""`Recorder`: writes the ledger of what a loader process serves, see `ledger`, many steps at a time.

A step is recorded when a rank is sent its first batch of it, not when it is planned ahead. A SIGKILL loses about a
second of steps: they can be planned again. Nothing that happens to the file ends a training run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa

from seqmesh.loader.feed import Feed
from seqmesh.loader.files import END_OF_STREAM
from seqmesh.loader.ledger.entries import SCHEMA, Entries, Parts, parts_of, trivial_lists
from seqmesh.loader.ledger.file import SUFFIX, UNWRITTEN, Head
from seqmesh.loader.planner import Step
from seqmesh.loader.state import StreamState

NEVER = float("inf")
SECONDS = 1.0  # that a step waits to be written, at most
MOST_BEGINNINGS = UNWRITTEN  # of steps, by ranks, that wait
MOST_DOCUMENTS = 1 << 17  # of the steps that wait: 48 bytes of each are kept
REMEMBERED = 1 << 12  # steps that are not recorded again for a rank which comes later

log = logging.getLogger("seqmesh.loader")

Place = tuple[int, int]  # rank and peer
Beginning = tuple[Parts, Place, bool, bool, int]  # as `Recorder.begin` has them, and when, in nanoseconds


@dataclass(slots=True)
class _Served:
    """A step that was recorded. begun: a bit for each place that has begun it since."""

    before: StreamState
    begun: int


class Recorder:
    """A new file in `folder`, and what waits to be written to it. due: when that is to be done, in seconds of the
    monotonic clock."""

    def __init__(self, folder: Path, feed: Feed) -> None:
        """Raises OSError where the file can not be made."""
        head = Head(
            settings=feed.settings,
            data=feed.data_fingerprint,
            sources=feed.sources.names,
            seqmesh=version("seqmesh"),
            host=socket.gethostname(),
            pid=os.getpid(),
            begun=datetime.now(UTC),
        )
        self.path = folder / f"{head.begun:%Y%m%dT%H%M%S.%fZ}-{head.host}-{head.pid}-{secrets.token_hex(2)}{SUFFIX}"
        self.due = NEVER
        self._file, self._size = _create(self.path, SCHEMA.with_metadata(head.to_metadata()).serialize())
        self._trivial = trivial_lists(feed.settings)
        self._waiting: list[Beginning] = []
        self._newest: Step | None = None  # whose beginning is the last that waits
        self._documents = 0  # of all that wait
        self._entries = Entries(self._trivial)
        self._served: dict[int, _Served] = {}
        self._bits: dict[Place, int] = {}
        self._failed = False

    def begin(self, step: Step, place: Place, *, anew: bool = True, continued: bool = False) -> None:
        """A rank is sent its first batch of a step; with `anew` False another one, with which it goes on. The step is
        recorded, unless it is for other ranks already: once more where this one had begun it before. continued: the
        rank was served by another loader process before."""
        if step is self._newest:
            parts = self._waiting[-1][0]
        else:
            self._newest, parts = step, parts_of(step)
            self._documents += len(step.documents.document)
        self._waiting.append((parts, place, anew, continued, time.time_ns()))
        if self.due == NEVER:
            self.due = time.monotonic() + SECONDS
        if len(self._waiting) >= MOST_BEGINNINGS or self._documents >= MOST_DOCUMENTS:
            self.flush()

    def lost(self, step: int, place: Place) -> None:
        """What a rank was sent of a step has not come: it has not begun it."""
        self._sort_out()
        if served := self._served.get(step):
            served.begun &= ~self._bits.get(place, 0)

    def flush(self) -> None:
        """Write what waits."""
        self._sort_out()
        entries, self._entries, self._documents, self.due = self._entries, Entries(self._trivial), 0, NEVER
        if len(entries) and self._file >= 0:
            batch = entries.to_batch()
            try:
                self._write(memoryview(batch.serialize()))
            except OSError as error:
                self._forgo(batch, error)

    def close(self) -> None:
        """Write what waits, and close the file. Does nothing the second time."""
        self.flush()
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._write(memoryview(END_OF_STREAM))
            os.close(self._file)
            self._file = -1

    def _sort_out(self) -> None:
        """Find which beginnings are recorded. Many at a time: between two batches every touch of memory costs more."""
        waiting, self._waiting, self._newest = self._waiting, [], None
        for parts, place, anew, continued, nanoseconds in waiting:
            if self._is_new(parts[0], place, anew):
                self._entries.add(parts, nanoseconds // 1000, continued=continued)

    def _is_new(self, before: StreamState, place: Place, anew: bool) -> bool:
        """Whether a step that begins at this state is to be recorded for a rank; notes that the rank has begun it."""
        bit = self._bits.setdefault(place, 1 << len(self._bits))
        if served := self._served.get(before.step):
            same = served.before is before or served.before == before
            if same and not (anew and served.begun & bit):
                served.begun |= bit
                return False
            del self._served[before.step]  # the newest are the last
        self._served[before.step] = _Served(before, bit)
        if len(self._served) > REMEMBERED:
            del self._served[next(iter(self._served))]
        return True

    def _write(self, message: memoryview) -> None:
        _write_all(self._file, message)
        self._size += len(message)

    def _forgo(self, batch: pa.RecordBatch, error: OSError) -> None:
        """Go on without these: half a record is cut off, so that the next one can be read."""
        if not self._failed:
            steps = batch.column("step").to_pylist()
            log.warning(
                "%s can not be written (%s): steps %d to %d are not in the ledger, serving goes on",
                self.path,
                error.strerror,
                steps[0],
                steps[-1],
            )
        self._failed = True
        try:
            os.ftruncate(self._file, self._size)
        except OSError:  # nothing can be added behind a torn record
            os.close(self._file)
            self._file = -1


def _create(path: Path, head: pa.Buffer) -> tuple[int, int]:
    """A new file with a head: its descriptor and size."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _write_all(file, memoryview(head))
        except OSError:
            os.close(file)
            path.unlink()
            raise
    except OSError as error:
        raise OSError(f"the ledger can not be written in {path.parent}: {error.strerror or error}") from error
    return file, len(head)


def _write_all(file: int, message: memoryview) -> None:
    while message:
        message = message[os.write(file, message) :]


@contextlib.contextmanager
def recording(folder: str | None, feed: Feed) -> Iterator[Recorder | None]:
    """A recorder while the block runs; None where no folder is given. Raises as `Recorder` does."""
    recorder = None if folder is None else Recorder(Path(folder), feed)
    try:
        yield recorder
    finally:
        if recorder:
            recorder.close()
