"""Reads documents from a Parquet file: one a row, a few rows at a time.

Only the columns that `Columns` names are read. A null id or source counts as absent: the document is then called
`file name:row`, rows being counted from 0.

Memory is bounded by a batch of about `rows.BATCH_BYTES` (or one row, where rows are larger) whatever the size of a row
group. A null or another type where text belongs is a bad record. A file that is no whole Parquet file, or has not the
columns, raises ValueError naming it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from seqmesh.tools.inputs import BUFFER_BYTES, stored
from seqmesh.tools.reading.rows import ColumnError, batch_rows, row_records, wanted_columns
from seqmesh.tools.records import Reading, Record

if TYPE_CHECKING:
    import pyarrow.parquet as pq

READ_ERRORS = (pa.ArrowException, OSError, EOFError, ValueError, OverflowError)  # of damaged files, and of servers


def row_groups(reading: Reading) -> list[tuple[int, int]]:
    """Of each row group: how many rows it has, and the decoded size in bytes of what is read of it."""
    try:
        with stored(reading.file) as raw:
            file = _opened(raw)
            columns = set(wanted_columns(reading, file.schema_arrow.names))
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            return [(group.num_rows, _decoded_bytes(group, columns)) for group in groups]
    except ColumnError:
        raise
    except READ_ERRORS as error:
        raise _unreadable(reading, reading.start.record, error) from error


def read_parquet(reading: Reading) -> Iterator[Record]:
    """The rows of the reading, as records."""
    with stored(reading.file) as raw:
        rows = _Rows(reading, raw)
        yield from rows


class _Rows:
    """Walks the rows of a reading; `row` is the next row, for messages."""

    def __init__(self, reading: Reading, stored: Any) -> None:
        self._reading = reading
        self._stored = stored
        self._row = reading.start.record
        self._stop = sys.maxsize if reading.stop is None else reading.stop

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from self._records()
        except ColumnError:
            raise
        except READ_ERRORS as error:
            raise _unreadable(self._reading, self._row, error) from error

    def _records(self) -> Iterator[Record]:
        file = _opened(self._stored, page_checksum_verification=True)
        columns = wanted_columns(self._reading, file.schema_arrow.names)
        first = 0  # row of the file with which the row group begins
        counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) != file.metadata.num_rows:
            raise pa.ArrowInvalid(f"its row groups have {sum(counts)} rows, it says {file.metadata.num_rows}")
        for group, rows in enumerate(counts):
            if first + rows > self._row and first < self._stop:
                yield from self._group(file, group, first, columns)
            first += rows

    def _group(self, file: pq.ParquetFile, group: int, first: int, columns: list[str]) -> Iterator[Record]:
        """The rows of one row group, without those outside the reading."""
        found = file.metadata.row_group(group)
        end = first + found.num_rows
        rows = batch_rows(found.total_byte_size, found.num_rows)
        batches = file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
        for batch in batches:
            last = first + batch.num_rows
            if last > self._row:
                wanted = batch.slice(self._row - first, self._stop - self._row)
                yield from self._batch(wanted, group, file.metadata.num_rows)
            if last >= self._stop:
                return
            first = last
        if first != end:
            raise pa.ArrowInvalid(f"row group {group} has {end - first} rows fewer than it says")

    def _batch(self, batch: pa.RecordBatch, group: int, rows: int) -> Iterator[Record]:
        size, first = self._reading.file.size, self._row
        position = [size * (row + 1) // rows for row in range(first, first + batch.num_rows)]
        for record in row_records(self._reading, batch, first=first, group=group, position=position):
            self._row += 1
            yield record


def _unreadable(reading: Reading, row: int, error: Exception) -> ValueError:
    what = "cut short, damaged, or no Parquet file"
    return ValueError(f"cannot read {reading.file.shown} at row {row}: {what}: {error}")


def _opened(stored: Any, **options: Any) -> pq.ParquetFile:
    # Imported here: with it come clients of object stores, which nobody needs who reads other files.
    import pyarrow.parquet as pq

    return pq.ParquetFile(stored, buffer_size=BUFFER_BYTES, **options)


def _decoded_bytes(group: pq.RowGroupMetaData, columns: set[str]) -> int:
    chunks = map(group.column, range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)
