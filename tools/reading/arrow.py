"""Reads documents from Arrow IPC files, in the file format or the stream format: one a row, as from Parquet.

The stream format has no index at its end, so a file that was cut short looks whole: its end mark is asked for, and that
nothing follows the first one. Only the columns that are wanted are read. What a batch says of itself is checked before
any value is touched, because Arrow trusts it.

Memory is bounded by one record batch of the wanted columns (of a local file only where it is compressed) and a few
decoded rows. A run that continues inside a file passes over the batches before. A file that is no whole Arrow file, or
has not the columns, raises ValueError naming it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds
from fsspec.implementations.local import LocalFileSystem

from seqmesh.loader.files import END_OF_STREAM
from seqmesh.tools.inputs import InputFile, stored
from seqmesh.tools.reading.rows import ColumnError, batch_rows, row_records, wanted_columns
from seqmesh.tools.records import Reading, Record

FILE_MAGIC = b"ARROW1"


def read_arrow(reading: Reading) -> Iterator[Record]:
    """The rows of the reading, as records."""
    row = 0  # with which the next batch begins
    stop = sys.maxsize if reading.stop is None else reading.stop
    try:
        with _opened(reading.file) as source:
            for number, (batch, position) in enumerate(_batches(source, reading)):
                skipped = max(reading.start.record - row, 0)
                if skipped < batch.num_rows and row < stop:
                    _check(batch)
                    wanted = batch.slice(skipped, stop - row - skipped)
                    yield from _records(reading, wanted, row + skipped, number, position)
                row += batch.num_rows
                if row >= stop:
                    return
    except ColumnError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError) as error:
        raise ValueError(
            f"cannot read {reading.file.shown} at row {row}: cut short, damaged, or no Arrow file: {error}"
        ) from error


@contextmanager
def _opened(file: InputFile) -> Iterator[Any]:
    """The file as Arrow sees it: mapped where it is on this machine."""
    if isinstance(file.filesystem, LocalFileSystem) and file.size:
        with pa.memory_map(file.path) as mapped:
            yield mapped
    else:
        with stored(file) as raw, pa.PythonFile(raw, mode="r") as source:
            yield source


def _batches(source: Any, reading: Reading) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The batches, each with the bytes of the file that are read by its end."""
    is_file = source.read(len(FILE_MAGIC)) == FILE_MAGIC
    open_reader: Any = pa.ipc.open_file if is_file else pa.ipc.open_stream
    if not is_file:
        _ask_for_end_mark(source)
    source.seek(0)
    names = open_reader(source).schema.names
    fields = [names.index(name) for name in wanted_columns(reading, names)]
    source.seek(0)
    batches = open_reader(source, options=pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False))
    if is_file:
        count = batches.num_record_batches
        for number in range(count):
            yield batches.get_batch(number), reading.file.size * (number + 1) // count
        return
    for batch in batches:
        yield batch, source.tell()
    if left := source.size() - source.tell():
        raise EOFError(f"{left} bytes follow the end mark of its stream")


def _ask_for_end_mark(source: Any) -> None:
    size = source.size()
    source.seek(max(size - len(END_OF_STREAM), 0))
    if source.read() != END_OF_STREAM:
        raise EOFError("it has neither the beginning of the file format nor the end mark of the stream format")


def _check(batch: pa.RecordBatch) -> None:
    """Raises ArrowInvalid where offsets lead out of a buffer. A string that is not UTF-8 is its row's own trouble."""
    batch.validate()
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
            if binary is None and not kinds.is_string_view(column.type):
                raise
            column.view(binary or pa.binary_view()).validate(full=True)


def _records(reading: Reading, batch: pa.RecordBatch, row: int, number: int, position: int) -> Iterator[Record]:
    """The rows of a batch that begins with row `row`, a few at a time."""
    step = batch_rows(batch.nbytes, batch.num_rows)
    for first in range(0, batch.num_rows, step):
        part = batch.slice(first, step)
        yield from row_records(reading, part, first=row + first, group=number, position=[position] * part.num_rows)
