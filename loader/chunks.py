"""From a record batch to a `Chunk`: the raw addresses of a column of lists, whatever type of list it is.

Rows are read through their offsets, which is right for sliced columns, and for null rows with bytes behind them. Chunks
are never joined, so no 32-bit offset can overflow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.catalog import Chunk
from seqmesh.loader.errors import ShardError
from seqmesh.packer.lengths import Int64Array

SPAN_TYPE = pa.large_list(pa.int32())
TARGETS = "targets"


def chunk_of(batch: pa.RecordBatch, column: str, where: str) -> Chunk:
    """The documents of a record batch. where: what messages call its file. Raises ShardError for a column that does not
    hold lists of ids."""
    check_column(batch.schema, column, where)
    lists: Any = batch.column(column)
    if lists.null_count or lists.values.null_count:
        raise ShardError(f"{where}: {column} has nulls: every document must be a list of ids, an empty one at least")
    targets = _targets(batch, where)
    return Chunk(
        offsets=_offsets(lists, where),
        ids=_ids(lists.values, where),
        spans=(0, 0, 0, 0, 0) if targets is None else span_addresses(targets, where),
        holds=targets,
        columns=batch,
    )


def check_column(schema: pa.Schema, column: str, where: str) -> None:
    """Raises ShardError where there is no such column, or it can not hold documents."""
    if column not in schema.names:
        raise ShardError(f"{where}: has no column {column!r}; it has {', '.join(schema.names) or 'none'}")
    if not is_id_list(kind := schema.field(column).type):
        raise ShardError(f"{where}: {column} is {kind}: must be a list of integers")


def is_id_list(kind: Any) -> bool:
    """Whether a column of this type can hold documents."""
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(lists and pa.types.is_integer(kind.value_type))


def is_span_type(kind: pa.DataType) -> bool:
    """Whether a column `targets` of this type can be read. The name of a list's items does not count."""
    return bool(pa.types.is_large_list(kind) and kind.value_type == SPAN_TYPE.value_type)


def list_addresses(column: Any) -> tuple[int, int, int]:
    """Addresses of a large_list column's offsets and values, and the number of values."""
    offsets = column.buffers()[1]
    return (offsets.address + column.offset * 8 if offsets else 0), _values_address(column.values), len(column.values)


def span_addresses(column: Any, where: Path | str) -> tuple[int, int, int, int, int]:
    """A record batch's row of the table for `locate_spans`. Raises ShardError where its buffers are too small."""
    try:
        column.validate()
    except pa.ArrowInvalid as error:
        raise ShardError(f"{where}: the column targets is damaged: {error}") from error
    valid = column.buffers()[0]
    return (*list_addresses(column), valid.address if valid else 0, column.offset)


def _targets(batch: pa.RecordBatch, where: str) -> Any:
    """The column of spans as `span_addresses` takes it; None where there is none."""
    if TARGETS not in batch.schema.names:
        return None
    column = batch.column(TARGETS)
    if is_span_type(column.type):
        return column
    try:
        return column.cast(SPAN_TYPE)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ShardError(f"{where}: targets is {column.type}: must be {SPAN_TYPE}: {error}") from error


def _offsets(lists: Any, where: str) -> Int64Array:
    """int64 [R + 1]; of large lists they are read where they are."""
    first, rows = lists.offset, len(lists)
    if pa.types.is_fixed_size_list(lists.type):
        return np.arange(first, first + rows + 1, dtype=np.int64) * int(lists.type.list_size)
    width = 8 if pa.types.is_large_list(lists.type) else 4
    buffer = lists.buffers()[1]
    if buffer is None or rows == 0:
        return np.zeros(1, np.int64)
    if buffer.size < (first + rows + 1) * width:
        raise ShardError(f"{where}: is damaged: its {rows} rows have {buffer.size // width} offsets")
    found: Any = np.frombuffer(buffer, f"<i{width}", rows + 1, first * width)
    return np.asarray(found, np.int64)


def _ids(values: Any, where: str) -> npt.NDArray[Any]:
    data = values.buffers()[1]
    if len(values) and (data is None or data.size * 8 < (values.offset + len(values)) * values.type.bit_width):
        raise ShardError(f"{where}: is damaged: it does not have the {len(values)} ids that it should")
    return np.asarray(values.to_numpy(zero_copy_only=True))


def _values_address(values: Any) -> int:
    data = values.buffers()[1]
    return data.address + values.offset * (values.type.bit_width // 8) if data else 0
