"""What happens to bad records: they end the run, or they are kept aside in `quarantine.jsonl`, one a line with its
reason.

While a run is unfinished the file has a temporary name. A resumed run cuts it back to what the last finished shard
covers and goes on from there, so that a record is in it once, whichever way the set was made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from seqmesh.loader.files import sync_folder
from seqmesh.tools.claim import QUARANTINE_NAME
from seqmesh.tools.records import BadRecord

OnError = Literal["stop", "skip"]


class Refusals:
    """Where bad records go. Without a file the first of them raises ValueError."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file

    def refuse(self, record: BadRecord) -> None:
        if self._file is None:
            raise ValueError(f"{record.sentence()}. Mend it, or skip bad records with on-error skip")
        self._file.write(record.as_json().encode() + b"\n")

    def sync(self) -> int:
        """Force the records to the disk. Returns the size of the file."""
        if self._file is None:
            return 0
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()


@contextmanager
def refusals(folder: Path, on_error: OnError, *, start: int) -> Iterator[Refusals]:
    """Bad records of a run that begins with `start` bytes of quarantine.

    The file gets its final name when the block ends without an exception; else it stays for the next run.
    """
    final, path = folder / QUARANTINE_NAME, _temporary(folder)
    if on_error == "stop":
        final.unlink(missing_ok=True)  # of an earlier run that skipped, and had nothing to skip
        path.unlink(missing_ok=True)
        yield Refusals(None)
        return
    if final.exists():
        final.replace(path)
    with path.open("ab") as file:
        file.truncate(start)
        result = Refusals(file)
        yield result
        result.sync()
    path.replace(final)
    sync_folder(folder)


def quarantined(folder: Path) -> int:
    """Bytes of the quarantine file that an unfinished run left."""
    return max(
        (path.stat().st_size for path in (folder / QUARANTINE_NAME, _temporary(folder)) if path.exists()), default=0
    )


def _temporary(folder: Path) -> Path:
    return folder / (QUARANTINE_NAME + ".tmp")
