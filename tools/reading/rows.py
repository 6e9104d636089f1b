"""Rows of tables as records: what Parquet and Arrow files share.

Values are read a batch of rows at a time. A null in a column of ids, sources or kept ones counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from seqmesh.tools.records import BadTextError, Reading, Record, bad_record, document_of

BATCH_BYTES = 8 << 20  # of decoded rows, estimated from the mean
BATCH_ROWS = 4096


class ColumnError(ValueError):
    """A file has not the columns that are wanted of it."""


def wanted_columns(reading: Reading, names: Sequence[str]) -> list[str]:
    """Those of the columns `names` that are read. Raises ColumnError where one that must be there is not."""
    columns = reading.columns
    options = {columns.chat: "chat_column", columns.text: "text_column", columns.id: "id_column"}
    for name in columns.needed:
        if name not in names:
            raise ColumnError(
                f"{reading.file.shown} has no column {name!r} (its columns: {', '.join(names[:20])}): name the right "
                f"one with {options.get(name, 'source_column')}"
            )
    if doubled := [name for name in columns.all if list(names).count(name) > 1]:
        raise ColumnError(f"{reading.file.shown} has two columns {doubled[0]!r}: which of them is meant?")
    return [name for name in columns.all if name in names]


def batch_rows(total_bytes: int, rows: int) -> int:
    """How many rows to decode at a time where `rows` of them have `total_bytes`."""
    return min(max(BATCH_BYTES // max(total_bytes // max(rows, 1), 1), 1), BATCH_ROWS)


def row_records(
    reading: Reading, batch: pa.RecordBatch, *, first: int, group: int, position: Sequence[int]
) -> Iterator[Record]:
    """The rows of a batch, of which the first is row `first` of the file. position: bytes of the file that are read
    once each of them is."""
    values = [_values(batch.column(index)) for index in range(batch.num_columns)]
    optional = [name for name in batch.schema.names if name != reading.columns.content]
    for number, row in enumerate(zip(*values, strict=True)):
        place = reading.place(first + number, 0, position[number], group)
        fields = dict(zip(batch.schema.names, row, strict=True))
        for name in optional:
            if fields[name] is None:
                del fields[name]
        try:
            yield document_of(place, fields)
        except BadTextError as error:
            yield bad_record(place, error, repr(fields).encode("utf-8", "backslashreplace"))


def _values(column: pa.Array[Any]) -> list[Any]:
    """A column as Python values; a string that is not UTF-8 stays binary data, which is no text."""
    try:
        return column.to_pylist()
    except (UnicodeDecodeError, ValueError, OverflowError):  # also times that Python has no value for
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b""
    except (ValueError, OverflowError):
        return scalar
