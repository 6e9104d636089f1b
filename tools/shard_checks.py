"""What must be true of the content of a shard set's files: every rule of the format, each a sentence when broken.

Takes Arrow tables and never looks outside a buffer's bounds, so damaged files are safe to check. Chunks are never
joined. Memory is bounded by the lengths of all documents and one block of ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.manifest import FileEntry, Manifest
from seqmesh.packer.lengths import Int64Array

ID_BLOCK = 1 << 24  # ids looked at in one go

Types = Mapping[str, tuple[pa.DataType, ...]]  # of each column, those that are accepted
INDEX_TYPES: Types = {"length": (pa.int64(),), "supervised": (pa.int64(),)}


def shard_types(manifest: Manifest) -> Types:
    """The columns of a shard."""
    ids = pa.large_list(pa.from_numpy_dtype(np.dtype(manifest.token_dtype)))
    return {"input_ids": (ids,), "doc_id": (pa.large_string(), pa.int64()), "source": (pa.uint16(),)}


def open_table(path: Path) -> pa.Table:
    """An Arrow file as a view of its memory map. Raises ValueError where it is none, or contradicts itself."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # that buffers are as large as they must be, not what is in them
        if len(set(reader.schema.names)) < len(reader.schema.names):
            raise pa.ArrowInvalid("two of its columns have the same name")
        return pa.Table.from_batches(batches, reader.schema)
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:  # the last one from names
        raise ValueError(f"is not readable as an Arrow file: {error}") from error


def column_problems(table: pa.Table, types: Types) -> list[str]:
    """Columns that are missing, of another type, or have nulls. Further checks make sense only without any."""
    found = []
    for name, accepted in types.items():
        if name not in table.schema.names:
            found.append(f"has no column {name}")
        elif not any(_same_type(table.schema.field(name).type, wanted) for wanted in accepted):
            kind = table.schema.field(name).type
            found.append(f"the column {name} is {kind}, not {' or '.join(map(str, accepted))}")
        elif nulls := table.column(name).null_count:
            found.append(f"the column {name} has {nulls:,} nulls")
    return found


def index_lengths(table: pa.Table) -> Int64Array:
    """The lengths of all documents, from the lengths index."""
    return _joined(table, "length")


def index_problems(table: pa.Table, entry: FileEntry) -> Iterator[str]:
    """What is wrong with the values of the lengths index."""
    lengths, supervised = _joined(table, "length"), _joined(table, "supervised")
    yield from _count_problems(len(lengths), int(lengths.sum()), entry)
    if wrong := int((lengths < 1).sum()):
        yield f"{wrong:,} documents have no length"
    # Without supervised spans every token but a document's first is predicted from those before it.
    if wrong := int((supervised != np.maximum(lengths - 1, 0)).sum()):
        yield f"the numbers of supervised tokens of {wrong:,} documents do not follow from their lengths"


def shard_problems(table: pa.Table, entry: FileEntry, manifest: Manifest, lengths: Int64Array | None) -> Iterator[str]:
    """What is wrong with the values of a shard. `lengths` are what the index says, None where it says nothing."""
    for column in table.column("input_ids").chunks:
        yield from _ids_problems(column, manifest.vocab_size)
    found = np.concatenate(
        [np.zeros(0, np.int64), *(np.diff(_offsets(column)) for column in table.column("input_ids").chunks)]
    )
    yield from _count_problems(len(found), int(found.sum()), entry)
    if lengths is not None and len(lengths) == len(found) and (wrong := int((lengths != found).sum())):
        yield f"the lengths of {wrong:,} documents are not those of the lengths index"
    if wrong := int((_joined(table, "source") >= len(manifest.sources)).sum()):
        yield f"the source codes of {wrong:,} documents are not among the manifest's {len(manifest.sources):,} sources"
    try:
        table.column("doc_id").validate(full=True)
    except pa.ArrowInvalid as error:
        yield f"the column doc_id is damaged: {error}"
    if "targets" in table.schema.names:
        yield "has supervised spans (the column targets), which this version does not know"


def _joined(table: pa.Table, name: str) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, np.uint16), *(chunk.to_numpy() for chunk in table.column(name).chunks)])


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """The name of a list's items does not count."""
    if isinstance(found, pa.LargeListType) and isinstance(wanted, pa.LargeListType):
        return bool(found.value_type == wanted.value_type)
    return bool(found == wanted)


def _count_problems(rows: int, tokens: int, entry: FileEntry) -> Iterator[str]:
    for what, found, recorded in (("rows", rows, entry.rows), ("tokens", tokens, entry.tokens)):
        if found != recorded:
            yield f"holds {found:,} {what}, the manifest says {recorded:,}"


def _offsets(column: Any) -> Int64Array:
    """The row offsets, straight from the buffer: Arrow's own readers trust them."""
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int64)[column.offset : column.offset + len(column) + 1]


def _ids_problems(column: Any, vocab_size: int) -> Iterator[str]:
    offsets, size = _offsets(column), len(column.values)
    if wrong := int((np.diff(offsets) < 0).sum()):
        yield f"the offsets of {wrong:,} documents run backwards"
    low, high = int(offsets.min()), int(offsets.max())
    if low < 0 or high > size:
        yield f"offsets reach from {low:,} to {high:,}: there are {size:,} ids"
    elif offsets[0] != 0 or offsets[-1] != size:
        yield f"{size - int(offsets[-1] - offsets[0]):,} ids belong to no document"
    ids = column.values.to_numpy()
    wrong = sum(int((ids[first : first + ID_BLOCK] >= vocab_size).sum()) for first in range(0, size, ID_BLOCK))
    if wrong:
        yield f"{wrong:,} ids are not below the vocabulary's size, {vocab_size:,}"
