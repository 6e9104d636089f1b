"""What must be true of the content of a shard set's files: every rule of the format, each a sentence when broken.

Takes Arrow tables and never looks outside a buffer's bounds, so damaged files are safe to check. Chunks are never
joined. Memory is bounded by the lengths of all documents and one block of ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.chunks import SPAN_TYPE, is_span_type
from seqmesh.loader.manifest import FileEntry, Manifest
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.one_pass import Numbers
from seqmesh.tools.targets import all_labels, count_problems, list_offsets, offset_problems, target_problems

ID_BLOCK = 1 << 24  # ids looked at in one go

Types = Mapping[str, tuple[pa.DataType, ...]]  # of each column, those that are accepted
INDEX_TYPES: Types = {"length": (pa.int64(),), "supervised": (pa.int64(),)}


def shard_types(manifest: Manifest) -> Types:
    """The columns of a shard."""
    ids = pa.large_list(pa.from_numpy_dtype(np.dtype(manifest.token_dtype)))
    return {"input_ids": (ids,), "doc_id": (pa.large_string(), pa.int64()), "source": (pa.uint16(),)}


def open_table(file: pa.Buffer) -> pa.Table:
    """An Arrow file, mapped to memory, as a view of it. Raises ValueError where it is none, or contradicts itself."""
    try:
        reader = pa.ipc.open_file(file)
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # that buffers are as large as they must be, not what is in them
        if len(set(reader.schema.names)) < len(reader.schema.names):
            raise pa.ArrowInvalid("two of its columns have the same name")
        return pa.Table.from_batches(batches, reader.schema)
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:  # the last one from names
        raise ValueError(f"is not readable as an Arrow file: {error}") from error


def id_ranges(table: pa.Table, file: pa.Buffer) -> list[Numbers] | None:
    """Where the ids of a shard lie in its file, record batch by record batch; None where they are no plain arrays
    there."""
    found = []
    column: Any
    for column in table.column("input_ids").chunks:
        values = column.values
        dtype = np.dtype(values.type.to_pandas_dtype())
        data, count = values.buffers()[1], len(values)
        start = 0 if data is None else data.address + values.offset * dtype.itemsize - file.address
        if not 0 <= start <= file.size - count * dtype.itemsize or start % dtype.itemsize:
            return None
        found.append(Numbers(start, count, dtype))
    return found


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


@dataclass(frozen=True, slots=True)
class Index:
    """What the lengths index says of documents: their lengths, how many labels of each are supervised, and the codes of
    their sources, which sets of earlier versions have in the shards only."""

    lengths: Int64Array
    supervised: Int64Array
    codes: npt.NDArray[np.uint16] | None

    def part(self, first: int, count: int) -> Index:
        chosen = slice(first, first + count)
        codes = None if self.codes is None else self.codes[chosen]
        return Index(self.lengths[chosen], self.supervised[chosen], codes)


def index_of(table: pa.Table) -> Index:
    """The content of the lengths index."""
    has_codes = "source" in table.schema.names and table.schema.field("source").type == pa.uint16()
    codes = _joined(table, "source") if has_codes else None
    return Index(_joined(table, "length"), _joined(table, "supervised"), codes)


def index_problems(table: pa.Table, index: Index, entry: FileEntry) -> Iterator[str]:
    """What is wrong with the values of the lengths index, which `index` is the content of."""
    lengths, supervised = index.lengths, index.supervised
    if "source" in table.schema.names and index.codes is None:
        yield f"the column source is {table.schema.field('source').type}, not uint16"
    yield from _count_problems(len(lengths), int(lengths.sum()), entry)
    if wrong := int((lengths < 1).sum()):
        yield f"{wrong:,} documents have no length"
    # Without supervised spans every token but a document's first is predicted from those before it; with them, fewer.
    if wrong := int(((supervised < 0) | (supervised > all_labels(lengths))).sum()):
        yield f"the numbers of supervised tokens of {wrong:,} documents do not follow from their lengths"


def shard_problems(
    table: pa.Table, entry: FileEntry, manifest: Manifest, index: Index | None, largest: int
) -> Iterator[str]:
    """What is wrong with the values of a shard. `index`: of its documents, None where the lengths index is no use.
    largest: no id is larger, as far as is known."""
    for column in table.column("input_ids").chunks:
        yield from offset_problems(column, "ids")
        if largest >= manifest.vocab_size:
            yield from _ids_problems(column, manifest.vocab_size)
    each = [np.diff(list_offsets(column)) for column in table.column("input_ids").chunks]
    found = each[0] if len(each) == 1 else np.concatenate([np.zeros(0, np.int64), *each])
    yield from _count_problems(len(found), int(found.sum()), entry)
    if index is not None and len(index.lengths) != len(found):
        index = None
    if index is not None and (wrong := int((index.lengths != found).sum())):
        yield f"the lengths of {wrong:,} documents are not those of the lengths index"
        index = None
    yield from _supervised_problems(table, found, index)
    codes = _joined(table, "source")
    if index is not None and index.codes is not None and (wrong := int((index.codes != codes).sum())):
        yield f"the sources of {wrong:,} documents are not those of the lengths index"
    if wrong := int((codes >= len(manifest.sources)).sum()):
        yield f"the source codes of {wrong:,} documents are not among the manifest's {len(manifest.sources):,} sources"
    try:
        table.column("doc_id").validate(full=True)
    except pa.ArrowInvalid as error:
        yield f"the column doc_id is damaged: {error}"


def _supervised_problems(table: pa.Table, lengths: Int64Array, index: Index | None) -> Iterator[str]:
    if "targets" not in table.schema.names:
        if index is not None:
            yield from count_problems(all_labels(lengths), index.supervised)
        return
    if not is_span_type(kind := table.schema.field("targets").type):
        yield f"the column targets is {kind}, not {SPAN_TYPE}"
        return
    first = 0
    for column in table.column("targets").chunks:
        last = first + len(column)
        supervised = index.supervised[first:last] if index is not None else None
        yield from target_problems(column, lengths[first:last], supervised)
        first = last


def _joined(table: pa.Table, name: str) -> npt.NDArray[Any]:
    chunks = [chunk.to_numpy() for chunk in table.column(name).chunks]
    return chunks[0] if len(chunks) == 1 else np.concatenate([np.zeros(0, np.uint16), *chunks])  # no copy of one


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """The name of a list's items does not count."""
    if isinstance(found, pa.LargeListType) and isinstance(wanted, pa.LargeListType):
        return bool(found.value_type == wanted.value_type)
    return bool(found == wanted)


def _count_problems(rows: int, tokens: int, entry: FileEntry) -> Iterator[str]:
    for what, found, recorded in (("rows", rows, entry.rows), ("tokens", tokens, entry.tokens)):
        if found != recorded:
            yield f"holds {found:,} {what}, the manifest says {recorded:,}"


def _ids_problems(column: Any, vocab_size: int) -> Iterator[str]:
    size = len(column.values)
    ids = column.values.to_numpy()
    wrong = sum(int((ids[first : first + ID_BLOCK] >= vocab_size).sum()) for first in range(0, size, ID_BLOCK))
    if wrong:
        yield f"{wrong:,} ids are not below the vocabulary's size, {vocab_size:,}"
