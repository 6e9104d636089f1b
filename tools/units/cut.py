"""Cuts the inputs into units: stretches of files of bounded size, each to be encoded by whichever process is free.

Where units are cut depends on the files (and on where an earlier run stopped), never on who works on them.

* plain files of lines are cut every UNIT_BYTES, without being read: whoever encodes a unit finds the lines in it.
* Parquet files are cut between row groups; a row group larger than UNIT_BYTES is read here.
* small files, of lines or of text, share a unit.
* what cannot be entered in the middle (compressed files, files of unknown size) is read here, and travels.

What is read here is bounded by UNIT_BYTES and one record. An input that cannot be read raises ValueError naming it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from seqmesh.tools.documents import READ_ERRORS, finished, read, readings, skip_to
from seqmesh.tools.inputs import BUFFER_BYTES, InputFile, Kind, is_compressed, opened
from seqmesh.tools.parquet import row_groups
from seqmesh.tools.records import LONGEST_RECORD, PLAIN, START, Columns, Cursor, Reading, Record

UNIT_BYTES = 4 << 20
UNIT_RECORDS = 4096  # files, and records that travel


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Stretches of files that follow each other. `records` holds what is in them where it is read already.

    size: in bytes, as far as it is known. position: bytes of all inputs, as stored, that are read by its end.
    """

    readings: tuple[Reading, ...]
    size: int
    position: int
    records: tuple[Record, ...] | None = None

    def __str__(self) -> str:
        first, last = self.readings[0], self.readings[-1]
        if len(self.readings) > 1:
            return f"{first.file.shown} to {last.file.shown} ({len(self.readings)} files)"
        return f"{first.file.shown}, {_extent(first, self)}"


def units(
    files: Sequence[InputFile], *, columns: Columns = PLAIN, start: Cursor = START, longest: int = LONGEST_RECORD
) -> Iterator[Unit]:
    """The inputs from `start` on, in order."""
    pending: list[Unit] = []
    for unit in _pieces(readings(files, columns=columns, start=start, longest=longest)):
        if pending and not _joins(pending, unit):
            yield _joined(pending)
            pending = []
        pending.append(unit)
    if pending:
        yield _joined(pending)


def records_of(unit: Unit) -> Iterator[Record]:
    """What is in a unit."""
    if unit.records is not None:
        return iter(unit.records)
    return (record for reading in unit.readings for record in read(reading))


def _pieces(stretches: Iterator[Reading]) -> Iterator[Unit]:
    cutters: dict[Kind, Callable[[Reading], Iterator[Unit]]] = {
        "jsonl": _cut_lines,
        "parquet": _cut_parquet,
        "text": _whole,
    }
    for reading in stretches:
        yield from cutters.get(reading.file.kind, _read_here)(reading)


def _joins(pending: Sequence[Unit], unit: Unit) -> bool:
    """Whether a unit is small enough to share one with those before it. Lines are counted from where a unit begins."""
    here = any(part.records is not None for part in (pending[0], unit))
    size = sum(part.size for part in pending) + unit.size
    return not here and not unit.readings[0].continues and size <= UNIT_BYTES and len(pending) < UNIT_RECORDS


def _joined(parts: Sequence[Unit]) -> Unit:
    if len(parts) == 1:
        return parts[0]
    stretches: list[Reading] = []
    for reading in (reading for part in parts for reading in part.readings):
        before = stretches[-1] if stretches else None
        if before and before.start.file == reading.start.file:  # the next rows of a table: of lines, no two go together
            stretches[-1] = replace(before, stop=reading.stop)
        else:
            stretches.append(reading)
    return Unit(readings=tuple(stretches), size=sum(part.size for part in parts), position=parts[-1].position)


def _whole(reading: Reading) -> Iterator[Unit]:
    size = reading.file.size
    yield Unit(readings=(reading,), size=size, position=reading.base + size)


def _cut_lines(reading: Reading) -> Iterator[Unit]:
    size, at = reading.file.size, reading.start.offset
    if is_compressed(reading.file) or not size:
        yield from _blocks(reading)
        return
    while at < size:
        stop = min((at // UNIT_BYTES + 1) * UNIT_BYTES, size)
        begins = at == reading.start.offset
        start = reading.start if begins else Cursor(file=reading.start.file, record=0, offset=at)
        part = replace(reading, start=start, stop=stop, continues=not begins)
        yield Unit(readings=(part,), size=stop - at, position=reading.base + stop)
        at = stop


def _blocks(reading: Reading) -> Iterator[Unit]:
    """The lines of a file, read from its beginning, in blocks of whole ones."""
    at = reading.start
    with opened(reading.file) as (stream, stored):
        while (block := _block(stream, reading, at))[1]:
            data, size = block
            part = replace(reading, start=at, data=data)
            yield Unit(readings=(part,), size=size, position=reading.base + stored.tell())
            at = replace(at, record=at.record + _count_lines(data), offset=at.offset + size)


def _block(stream: io.BufferedReader, reading: Reading, at: Cursor) -> tuple[bytes, int]:
    """The next lines, and the number of bytes that they are: see `finished`."""
    block = bytearray()
    try:
        if at == reading.start:
            skip_to(stream, reading)
        while len(block) < UNIT_BYTES and (chunk := stream.read(min(BUFFER_BYTES, UNIT_BYTES - len(block)))):
            block += chunk
        return finished(stream, bytes(block), reading)
    except READ_ERRORS as error:
        line = at.record + block.count(b"\n")
        raise ValueError(f"cannot read {reading.file.shown} after line {line}: {error}") from error


def _count_lines(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n"))


def _cut_parquet(reading: Reading) -> Iterator[Unit]:
    """Row groups, one after the other as long as they fit into a unit; one that is larger is read here."""
    groups = row_groups(reading)
    every = sum(rows for rows, _ in groups)
    last = 0
    for rows, size in groups:
        first, last = max(last, reading.start.record), last + rows
        if first >= last:
            continue
        part = replace(reading, start=replace(reading.start, record=first), stop=last)
        unit = Unit(readings=(part,), size=size, position=reading.base + reading.file.size * last // every)
        if size <= UNIT_BYTES:
            yield unit
        else:
            yield from _read_here(part)


def _read_here(reading: Reading) -> Iterator[Unit]:
    """The records of a file, a unit's worth at a time: for what cannot be entered in the middle."""
    pending: list[Record] = []
    size = 0
    for record in read(reading):
        if pending and (size + record.size > UNIT_BYTES or len(pending) >= UNIT_RECORDS):
            yield _travelling(pending, reading)
            pending, size = [], 0
        pending.append(record)
        size += record.size
    if pending:
        yield _travelling(pending, reading)


def _travelling(records: Sequence[Record], reading: Reading) -> Unit:
    part = replace(reading, start=records[0].place.cursor)
    size = sum(record.size for record in records)
    return Unit(readings=(part,), size=size, position=records[-1].place.position, records=tuple(records))


def _extent(reading: Reading, unit: Unit) -> str:
    if unit.records is not None:
        return f"records {unit.records[0].place.number} to {unit.records[-1].place.number}"
    if reading.file.has_rows:
        return f"rows {reading.start.record} to {reading.stop}"
    return f"bytes {reading.start.offset} to {reading.start.offset + unit.size}"
