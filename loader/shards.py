"""`ShardSet`: a finished shard set, memory-mapped. Lengths of all documents at once; tokens by address.

Opening checks that every file is there, has the size the manifest gives and the right columns; it reads no token.
Chunks (record batches) are never joined, so no 32-bit offset can overflow. Checksums are not read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from seqmesh.loader.errors import ShardError
from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import FileEntry, Manifest, read_manifest
from seqmesh.loader.spans import Spans, locate_spans
from seqmesh.packer.jit import array_at, jit, pointer
from seqmesh.packer.lengths import Int64Array

SPAN_TYPE = pa.large_list(pa.int32())


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where the tokens are: one row per record batch of all shards, in order.

    first_row [C + 1]: number of the first document. offsets, values [C]: addresses of the int64 row offsets and of the
    token ids. size [C]: ids in the values. shard [C]: which file.
    """

    first_row: Int64Array
    offsets: Int64Array
    values: Int64Array
    size: Int64Array
    shard: Int64Array


class ShardSet:
    """Documents by number (0 to `len` − 1). Holds the memory maps; addresses are good as long as it lives."""

    def __init__(self, folder: Path | str) -> None:
        """Raises FileNotFoundError without a manifest, ValueError for an unfit one, ShardError for an unfit file."""
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)
        self.token_dtype: np.dtype[Any] = np.dtype(self.manifest.token_dtype)
        self.lengths, self.supervised = self._open_lengths()
        self._batches: list[pa.RecordBatch] = []
        self._chunks = self._open_shards()
        self._span_columns = self._open_spans()

    def __len__(self) -> int:
        return self.manifest.documents

    @property
    def fingerprint(self) -> str:
        """Hash of the shards' checksums: which data this is, wherever it lies."""
        return xxhash.xxh3_128("".join(shard.xxh3 for shard in self.manifest.shards).encode()).hexdigest()

    def addresses(self, documents: Int64Array) -> Int64Array:
        """Address of the first token of each document. Raises ShardError where a shard contradicts the lengths."""
        found = np.empty(len(documents), np.int64)
        chunks = self._chunks
        bad = _locate(
            documents,
            self.lengths,
            chunks.first_row,
            chunks.offsets,
            chunks.values,
            chunks.size,
            self.token_dtype.itemsize,
            found,
        )
        if bad >= 0:
            document = int(documents[bad])
            raise ShardError(
                f"{self.file_of(document)}: the offsets of document {document} contradict the lengths index; "
                "the file is damaged"
            )
        return found

    def spans(self, documents: Int64Array) -> Spans | None:
        """Supervised spans of each document; None where no shard of the set has any: everything is supervised. Raises
        ShardError where spans are not inside their document or do not ascend."""
        if self._span_columns is None:
            return None
        found = np.empty((2, len(documents)), np.int64)
        bad = locate_spans(documents, self.lengths, self._chunks.first_row, self._span_columns, found)
        if bad >= 0:
            document = int(documents[bad])
            raise ShardError(
                f"{self.file_of(document)}: the spans (targets) of document {document} are not ascending ranges of its "
                f"{self.lengths[document]} tokens; the file is damaged"
            )
        return Spans(found[0], found[1])

    def file_of(self, document: int) -> Path:
        """The shard that a document is in."""
        chunk = int(np.searchsorted(self._chunks.first_row, document, side="right")) - 1
        return self.folder / self.manifest.shards[int(self._chunks.shard[chunk])].file

    def tokens(self, document: int) -> npt.NDArray[Any]:
        """A read-only view of one document's token ids."""
        chunk = int(np.searchsorted(self._chunks.first_row, document, side="right")) - 1
        row = document - int(self._chunks.first_row[chunk])
        ids = self._batches[chunk].column("input_ids")[row].values
        return np.asarray(ids.to_numpy(zero_copy_only=True))

    def doc_id(self, document: int) -> str:
        """The name that the input gave to a document."""
        chunk = int(np.searchsorted(self._chunks.first_row, document, side="right")) - 1
        row = document - int(self._chunks.first_row[chunk])
        return str(self._batches[chunk].column("doc_id")[row].as_py())

    def source_codes(self) -> npt.NDArray[np.uint16]:
        """The source of each document, as a place in the manifest's list. Raises ShardError for a file whose column is
        of another type (a dictionary, say, whose codes mean something else in each chunk), or has other codes."""
        known, parts = len(self.manifest.sources), [np.zeros(0, np.uint16)]
        for number, batch in zip(self._chunks.shard.tolist(), self._batches, strict=True):
            path = self.folder / self.manifest.shards[number].file
            found = batch.schema.field("source").type if "source" in batch.schema.names else None
            if found != pa.uint16():
                raise ShardError(f"{path}: source is {found}: must be uint16")
            codes = np.asarray(batch.column("source").to_numpy(zero_copy_only=False))
            if codes.dtype != np.uint16 or int(codes.max()) >= known:  # nulls come as floats
                raise ShardError(f"{path}: has a document whose source is none of the manifest's {known}")
            parts.append(codes)
        return np.concatenate(parts)

    def check_checksums(self) -> None:
        """Read every file of the set. Raises ShardError for the first whose bytes are not those the manifest knows."""
        for entry in (*self.manifest.shards, self.manifest.lengths):
            if checksum(self.folder / entry.file) != entry.xxh3:
                raise ShardError(f"{self.folder / entry.file}: is damaged: its checksum differs from the manifest's")

    def _open_lengths(self) -> tuple[Int64Array, Int64Array]:
        entry = self.manifest.lengths
        table = open_arrow(self.folder / entry.file, entry).read_all()
        columns = []
        for name in ("length", "supervised"):
            if name not in table.schema.names or table.schema.field(name).type != pa.int64():
                raise ShardError(f"{self.folder / entry.file}: has no int64 column {name!r}")
            columns.append(np.asarray(table[name].to_numpy(), np.int64))
        if len(columns[0]) != entry.rows or int(columns[0].sum()) != entry.tokens:
            raise ShardError(f"{self.folder / entry.file}: does not hold the rows and tokens the manifest gives")
        return columns[0], columns[1]

    def _open_shards(self) -> Chunks:
        rows: list[tuple[int, int, int, int, int]] = []  # rows, offsets, values, size, shard
        for number, entry in enumerate(self.manifest.shards):
            reader = open_arrow(self.folder / entry.file, entry)
            self._check_schema(reader.schema, self.folder / entry.file)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            if sum(batch.num_rows for batch in batches) != entry.rows:
                raise ShardError(f"{self.folder / entry.file}: does not hold the {entry.rows} rows the manifest gives")
            for batch in batches:
                if batch.num_rows:
                    self._batches.append(batch)
                    rows.append((batch.num_rows, *list_addresses(batch.column("input_ids")), number))
        table = np.array(rows, np.int64).reshape(-1, 5)
        first_row = np.concatenate([np.zeros(1, np.int64), np.cumsum(table[:, 0])])
        return Chunks(first_row, *(np.ascontiguousarray(table[:, i]) for i in range(1, 5)))

    def _open_spans(self) -> Int64Array | None:
        """The table for `locate_spans`, None where no shard has spans."""
        table = np.zeros((len(self._batches), 5), np.int64)
        for row, batch, shard in zip(table, self._batches, self._chunks.shard, strict=True):
            if "targets" in batch.schema.names:
                row[:] = _span_addresses(batch.column("targets"), self.folder / self.manifest.shards[shard].file)
        return table if table.any() else None

    def _check_schema(self, schema: pa.Schema, path: Path) -> None:
        expected = pa.large_list(pa.from_numpy_dtype(self.token_dtype))
        found = schema.field("input_ids").type if "input_ids" in schema.names else None
        if not (found and pa.types.is_large_list(found) and found.value_type == expected.value_type):
            raise ShardError(f"{path}: input_ids is {found}: the manifest says {expected}")
        if "targets" in schema.names and not is_span_type(schema.field("targets").type):
            raise ShardError(f"{path}: targets is {schema.field('targets').type}: must be {SPAN_TYPE}")


def is_span_type(kind: pa.DataType) -> bool:
    """Whether a column `targets` of this type can be read. The name of a list's items does not count."""
    return bool(pa.types.is_large_list(kind) and kind.value_type == SPAN_TYPE.value_type)


def open_arrow(path: Path, entry: FileEntry) -> pa.ipc.RecordBatchFileReader:
    """Memory-map one Arrow IPC file of a set. Raises ShardError where it is missing, truncated or no Arrow file."""
    if not path.is_file():
        raise ShardError(f"{path}: is missing; the manifest lists it")
    size = path.stat().st_size
    if size != entry.bytes:
        raise ShardError(f"{path}: has {size} bytes, the manifest says {entry.bytes}; copy or prepare it again")
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardError(f"{path}: is not an Arrow file: {error}") from error


def list_addresses(column: Any) -> tuple[int, int, int]:
    """Addresses of a large_list column's offsets and values, and the number of values. Rows are read through offsets,
    which is right for sliced columns too."""
    offsets, values = column.buffers()[1], column.values
    data = values.buffers()[1]
    offset_address = offsets.address + column.offset * 8 if offsets else 0
    value_address = data.address + values.offset * (values.type.bit_width // 8) if data else 0
    return offset_address, value_address, len(values)


def _span_addresses(column: Any, path: Path) -> tuple[int, int, int, int, int]:
    """A record batch's row of the table for `locate_spans`."""
    try:
        column.validate()  # that buffers are as large as they must be
    except pa.ArrowInvalid as error:
        raise ShardError(f"{path}: the column targets is damaged: {error}") from error
    valid = column.buffers()[0]
    return (*list_addresses(column), valid.address if valid else 0, column.offset)


@jit
def _locate(
    documents: Int64Array,
    lengths: Int64Array,
    first_row: Int64Array,
    offsets: Int64Array,
    values: Int64Array,
    size: Int64Array,
    itemsize: int,
    found: Int64Array,
) -> int:
    """Fill `found` with addresses; returns the index of the first document whose offsets are wrong, or -1.

    The check keeps a damaged shard from being read outside its memory.
    """
    for i in range(len(documents)):
        document = documents[i]
        chunk = np.searchsorted(first_row, document, side="right") - 1
        row = document - first_row[chunk]
        rows = array_at(pointer(offsets[chunk]), (row + 2,), np.int64)
        start, stop = rows[row], rows[row + 1]
        if start < 0 or stop > size[chunk] or stop - start != lengths[document]:
            return i
        found[i] = values[chunk] + start * itemsize
    return -1
