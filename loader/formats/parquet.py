"""Parquet files with one column of token ids: decoded once, row group by row group, to Arrow files of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seqmesh.loader.catalog import COLUMN, Chunk, Reading
from seqmesh.loader.chunks import TARGETS, check_column, chunk_of
from seqmesh.loader.errors import ShardError
from seqmesh.loader.formats.scanned import Files
from seqmesh.loader.manifest import token_dtype
from seqmesh.loader.storage.location import Location

BATCH_IDS = 1 << 24  # decoded at a time, about: bounds memory, and keeps 32-bit offsets from overflowing
EXTRA = ("source", "doc_id", TARGETS)


def files_of(location: Location, sizes: dict[str, int], reading: Reading) -> Files:
    """Parquet files of a folder, in this order."""
    assert reading.vocab_size is not None
    return Files(
        location=location,
        format="parquet",
        sizes=sizes,
        opened=partial(chunks, column=reading.column),
        bring=partial(bring, location, reading),
        beside=not location.is_local,
        options=str(token_dtype(reading.vocab_size)),
    )


def chunks(path: Path, where: str, column: str = COLUMN) -> list[Chunk]:
    """The documents of a decoded file."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardError(f"{where}: its decoded copy {path} can not be read: {error}; remove that") from error
    return [chunk_of(batch, column, where) for batch in batches if batch.num_rows]


def bring(location: Location, reading: Reading, name: str, target: Path) -> None:
    """Decode one file of the folder to an Arrow file. Raises ShardError for one that is damaged, has not the column, or
    holds ids outside the vocabulary."""
    where = str(location.child(name))
    if location.is_local:
        decode(location.path / name, target, where, reading)
        return
    raw = target.with_name(f"{target.name}.parquet.tmp")
    try:
        location.fetch(name, raw)
        decode(raw, target, where, reading)
    finally:
        raw.unlink(missing_ok=True)


def decode(path: Path, target: Path, where: str, reading: Reading) -> None:
    """The same for a local file."""
    assert reading.vocab_size is not None
    dtype = token_dtype(reading.vocab_size)
    try:
        with pq.ParquetFile(path) as file:
            check_column(file.schema_arrow, reading.column, where)
            columns = [reading.column, *(name for name in EXTRA if name in file.schema_arrow.names)]
            ids = pa.field(reading.column, pa.large_list(pa.from_numpy_dtype(dtype)))
            schema = pa.schema([ids, *(_plain(file.schema_arrow.field(name)) for name in columns[1:])])
            with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                row = 0
                for batch in _batches(file, columns, reading.column):
                    narrow = _narrowed(batch.column(reading.column), dtype, reading.vocab_size, where, row)
                    rest = [batch.column(name).cast(schema.field(name).type) for name in columns[1:]]
                    writer.write_batch(pa.RecordBatch.from_arrays([narrow, *rest], schema=schema))
                    row += batch.num_rows
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        raise ShardError(f"{where}: can not be read as Parquet: {str(error).strip()}") from error


def _plain(field: Any) -> Any:
    """Dictionaries may differ between row groups, and a file of Arrow has only one."""
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def _batches(file: Any, columns: list[str], column: str) -> Iterator[Any]:
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        values = max(
            (group.column(i).num_values for i in range(group.num_columns) if _is_of(group.column(i), column)), default=1
        )
        rows = max(BATCH_IDS * group.num_rows // max(values, 1), 1)
        yield from file.iter_batches(batch_size=min(rows, 1 << 16), row_groups=[number], columns=columns)


def _is_of(chunk: Any, column: str) -> bool:
    return bool(chunk.path_in_schema.split(".")[0] == column)


def _narrowed(lists: Any, dtype: np.dtype[Any], vocab_size: int, where: str, row: int) -> Any:
    """The ids as large lists of the vocabulary's type. row: of the first list, for messages."""
    if lists.null_count:
        bad = int(np.flatnonzero(~np.asarray(lists.is_valid()))[0])
        raise ShardError(f"{where}: row {row + bad} is null: must be a list of ids")
    lengths = np.asarray(pc.list_value_length(lists).to_numpy(zero_copy_only=False), np.int64)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    values = lists.flatten()
    if values.null_count:
        at = int(np.flatnonzero(~np.asarray(values.is_valid()))[0])
        raise ShardError(f"{where}: row {row + _row_of(at, offsets)} holds a null: must be ids")
    ids = values.to_numpy()
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise ShardError(
            f"{where}: row {row + _row_of(at, offsets)} holds the id {ids[at]}: must be below vocab_size, {vocab_size}"
        )
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(ids.astype(dtype)))


def _row_of(place: int, offsets: Any) -> int:
    return int(np.searchsorted(offsets, place, side="right")) - 1
