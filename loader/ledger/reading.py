"""`Ledger`: all files of a folder together, so that "what did step N train on" has one answer.

Every loader process writes a file of its own. Those of one *run* are files of processes that served at the same time
(each machine has one), or that took over from one another; a step that several of them have was served once. What a
process that was killed had not written yet is planned again: a step is a pure function of the state after the one
before, the settings and the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed
from seqmesh.loader.ledger.file import EPOCH, SUFFIX, UNWRITTEN, LedgerFile, Record, read_file, record_at, record_of
from seqmesh.loader.planner import Step
from seqmesh.loader.state import StreamState
from seqmesh.packer.lengths import Int64Array

Row = tuple[int, int, int]  # file, record batch, row in it


@dataclass(frozen=True, slots=True)
class _Index:
    """Where rows are, sorted by step, then by time. step, time (microseconds), file, batch, row [N]: int64."""

    step: Int64Array
    time: Int64Array
    file: Int64Array
    batch: Int64Array
    row: Int64Array

    def of(self, step: int) -> list[Row]:
        first, last = np.searchsorted(self.step, [step, step + 1])
        columns = (self.file[first:last], self.batch[first:last], self.row[first:last])
        return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run: first and last step (0 where none was recorded), how many were, when it began, and where."""

    first: int
    last: int
    steps: int
    begun: datetime
    hosts: tuple[str, ...]


class Ledger:
    """What the files of a folder tell. files: by the time they were begun. damage: a sentence for each that could not
    be read to its end. runs: the run of each file, counted from 0."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError where there is no such folder or no file in it, ValueError where no file of it can
        be read."""
        self.folder = folder
        paths = sorted(folder.glob(f"*{SUFFIX}"))
        if not paths:
            raise FileNotFoundError(f"{folder} holds no ledger: no file there ends with {SUFFIX}")
        self.damage: list[str] = []
        self.files = sorted(self._read(paths), key=lambda file: file.head.begun)
        if not self.files:
            raise ValueError("; ".join(self.damage))
        self._index = _index(self.files)
        self.runs = _runs(self.files, self._index)

    @property
    def steps(self) -> Int64Array:
        """The steps that were recorded, ascending."""
        return np.unique(self._index.step)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """First and last of the steps that are missing between recorded ones."""
        return [(a + 1, b - 1) for a, b in pairwise(self.steps.tolist()) if b > a + 1]

    def span(self, run: int) -> Span:
        """What one run did."""
        chosen = [number for number, each in enumerate(self.runs) if each == run]
        steps = np.unique(self._index.step[np.isin(self._index.file, chosen)])
        heads = [self.files[number].head for number in chosen]
        return Span(
            first=int(steps[0]) if len(steps) else 0,
            last=int(steps[-1]) if len(steps) else 0,
            steps=len(steps),
            begun=heads[0].begun,
            hosts=tuple(sorted({head.host for head in heads})),
        )

    def recorded(self, step: int) -> list[Record]:
        """A record for each time that a step was served, the latest last. Raises ValueError for a damaged one."""
        groups: dict[tuple[int, str, object], dict[int, list[Record]]] = {}
        for file, batch, row in self._index.of(step):
            record = record_at(self.files[file], batch, row)
            key = self.runs[file], record.plan, record.before
            groups.setdefault(key, {}).setdefault(file, []).append(record)
        served = [record for by_file in groups.values() for record in max(by_file.values(), key=len)]
        return sorted(served, key=lambda record: record.time)

    def find(self, step: int, data: str | None = None) -> list[Record]:
        """The same; where the step is missing before a recorded one, or is one of those that a loader which was killed
        may have served last, it is planned again. data: where the shard set is by now. Raises ValueError for a step
        after those, or one that can not be planned again."""
        if found := self.recorded(step):
            return found
        steps = self.steps
        if not len(steps):
            raise ValueError(f"{self.folder} has no step yet")
        last = int(steps[-1])
        if last < step <= last + UNWRITTEN and (planned := self._plan_on(step, last, data)):
            return [planned]
        if not 0 <= step < last:
            raise ValueError(f"step {step} is not in {self.folder}: it has steps {steps[0]} to {steps[-1]}")
        next_one = int(np.searchsorted(steps, step))
        first = int(steps[next_one - 1]) + 1 if next_one else 0
        return [self._plan_again(step, first, int(steps[next_one]) - 1, data)]

    def _plan_on(self, step: int, last: int, data: str | None) -> Record | None:
        """A step after the last that was recorded; None where there is none, or its loader ended in order."""
        known = self.recorded(last)[-1]
        if next(file.closed for file in self.files if file.path == known.file):
            return None
        with opened(known, data) as feed:
            planned = feed.step(known.after)
            while planned is not None and planned.before.step < step:
                planned = feed.step(planned.after)
        return None if planned is None else record_of(planned, known.head, known.time)

    def _plan_again(self, step: int, first: int, last: int, data: str | None) -> Record:
        """One of the missing steps `first` to `last`. All of them are planned, to see that they lead to the one that
        was recorded after them."""
        following = self.recorded(last + 1)
        known = self.recorded(first - 1)[-1] if first else following[-1]
        with opened(known, data) as feed:
            state: StreamState | None = known.after if first else feed.start
            wanted: Step | None = None
            while state is not None and state.step <= last:
                planned = feed.step(state)
                wanted = planned if state.step == step else wanted
                state = None if planned is None else planned.after
        if wanted is None or state not in [record.before for record in following]:
            words = f"step {first} is" if first == last else f"steps {first} to {last} are"
            start = f"what follows step {first - 1}" if first else "what follows the start"
            raise ValueError(
                f"{words} missing and can not be planned again: {start} does not lead to step {last + 1} as it was "
                "recorded; were the settings others by then?"
            )
        return record_of(wanted, known.head, known.time)

    def steps_with(self, document: int) -> list[int]:
        """Steps that were recorded with a document (row of the set)."""
        found = {step for file in self.files for batch in file.batches for step in _steps_with(batch, document)}
        return sorted(found)

    def _read(self, paths: list[Path]) -> Iterator[LedgerFile]:
        for path in paths:
            try:
                file = read_file(path)
            except ValueError as error:
                self.damage.append(str(error))
                continue
            if file.damage:
                rows = sum(batch.num_rows for batch in file.batches)
                self.damage.append(
                    f"{path}: read up to byte {file.intact} of {path.stat().st_size}, {rows} steps; then: {file.damage}"
                )
            yield file


@contextlib.contextmanager
def opened(record: Record, data: str | None = None) -> Iterator[Feed]:
    """What the record's step was planned from. data: where that is by now. Raises ValueError where it is not there, or
    is not the same."""
    settings = replace(record.head.settings, verify=False)
    settings = settings if data is None else replace(settings, data=data)
    try:
        feed = Feed(settings)
    except (LoaderError, ValueError, OSError) as error:
        raise ValueError(f"the data are not there: {error}") from error
    try:
        if feed.data_fingerprint != record.head.data:
            raise ValueError(f"the data are not there: {settings.data} is not what step {record.step} was taken from")
        yield feed
    finally:
        feed.shards.close()


def _index(files: list[LedgerFile]) -> _Index:
    parts = [np.zeros((5, 0), np.int64)]
    for number, file in enumerate(files):
        for place, batch in enumerate(file.batches):
            part = np.empty((5, batch.num_rows), np.int64)
            part[0] = _column(batch, "step")
            part[1] = _column(batch, "time").astype(np.int64)
            part[2], part[3], part[4] = number, place, np.arange(batch.num_rows)
            parts.append(part)
    table = np.concatenate(parts, axis=1)
    return _Index(*table[:, np.lexsort((table[1], table[0]))])


def _runs(files: list[LedgerFile], index: _Index) -> list[int]:
    """The run of each file, in the order they were begun: it belongs to the one before while that served still, or
    where it went on with a rank of it."""
    last = np.zeros(len(files), np.int64)
    np.maximum.at(last, index.file, index.time)
    runs: list[int] = []
    end = 0
    for file, ended in zip(files, last.tolist(), strict=True):
        begun = (file.head.begun - EPOCH) // timedelta(microseconds=1)
        joins = begun <= end or any(_column(batch, "continued").any() for batch in file.batches)
        runs.append(runs[-1] + (not joins) if runs else 0)
        end = max(end, begun, ended)
    return runs


def _steps_with(batch: pa.RecordBatch, document: int) -> list[int]:
    column: Any = batch.column("document")
    places = np.flatnonzero(column.values.to_numpy() == document)
    rows = np.searchsorted(column.offsets.to_numpy(), places, side="right") - 1
    return [int(step) for step in _column(batch, "step")[rows]]


def _column(batch: pa.RecordBatch, name: str) -> npt.NDArray[Any]:
    return np.asarray(batch.column(name).to_numpy(zero_copy_only=False))
