"""`ShardSet`: the documents of a set, whatever its format. Lengths of all of them at once; tokens by address.

Files on this machine are memory-mapped at the start: each must be there, with its size and the right columns; no token
is read, no checksum computed. What must be fetched or decoded first comes part by part, see `arrivals`. Chunks (record
batches) are never joined.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.loader.arrivals import Arrivals
from seqmesh.loader.catalog import Catalog, Chunk, Reading
from seqmesh.loader.errors import ShardError
from seqmesh.loader.formats.detect import OpenSet, open_set
from seqmesh.loader.formats.seqmesh import check_checksums, source_codes
from seqmesh.loader.gather import ADDRESS, LIMIT, WIDTH
from seqmesh.loader.spans import Spans, locate_spans
from seqmesh.loader.storage.cache import Cache
from seqmesh.packer.jit import array_at, jit, pointer
from seqmesh.packer.lengths import Int64Array

log = logging.getLogger("seqmesh.loader")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Where the tokens of the open parts are: one row for each chunk, in the order of documents; int64.

    first_row [C]: number of its first document. rows, offsets, values, size [C]: documents, the addresses of their
    offsets and of the ids, and how many ids there are. width, limit [C]: bytes of an id, and what ids are below. spans
    [C, 5]: see `locate_spans`.
    """

    first_row: Int64Array
    rows: Int64Array
    offsets: Int64Array
    values: Int64Array
    size: Int64Array
    width: Int64Array
    limit: Int64Array
    spans: Int64Array


class ShardSet:
    """Documents by number (0 to `len` − 1). Addresses are good until something else is asked for.

    lengths, supervised [N], sources, vocab_size, part_first [P + 1]: see `Catalog`. arrivals: parts that are not read
    in their place; None where all are.
    """

    def __init__(self, data: Path | str, *, reading: Reading | None = None, cache: Cache | None = None) -> None:
        """Raises FileNotFoundError where there is no set, ValueError for an unfit manifest or a reading that lacks
        something, ShardError for an unfit file, RemoteError where something can not be fetched."""
        self._reading = reading or Reading()
        cache = cache or Cache.default()
        self._set: OpenSet = open_set(str(data), self._reading, cache)
        self.catalog: Catalog = self._set.catalog
        self.lengths, self.supervised = self.catalog.lengths, self.catalog.supervised
        self.sources, self.vocab_size = self.catalog.sources, self.catalog.vocab_size
        self.part_first = self.catalog.part_first
        self._has_spans = bool((self.supervised != np.maximum(self.lengths - 1, 0)).any())
        self._bad = dict(self.catalog.bad)
        for why in self._bad.values():
            log.warning("left out: %s", why)
        self.arrivals = Arrivals(self._set, cache) if self._set.in_place is None else None
        self._chunks: dict[int, list[Chunk]] = self.arrivals.chunks if self.arrivals else {}
        for number in range(len(self.catalog.parts) if self._set.in_place else 0):
            self._open_or_refuse(number)
        self._changes, self._table = 0, self._tabled()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def usable(self) -> npt.NDArray[np.bool_] | None:
        """[N] which documents can be served; None where no part is left out."""
        if not self._bad:
            return None
        found = np.ones(len(self), np.bool_)
        for number in self._bad:
            found[self.part_first[number] : self.part_first[number + 1]] = False
        return found

    @property
    def bad_shards(self) -> dict[str, str]:
        """Files that are left out, and why."""
        return {self.catalog.parts[number].file: why for number, why in self._bad.items()}

    @property
    def fingerprint(self) -> str:
        """Which data is served, wherever it lies: of the set, and of the parts that are left out."""
        without = "".join(f" without {number}" for number in sorted(self._bad))
        return self.catalog.fingerprint + without

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """Of the ids of an open part."""
        return next((chunks[0].ids.dtype for chunks in self._chunks.values() if chunks), np.dtype(np.uint32))

    def places(self, documents: Int64Array) -> Int64Array:
        """Of each document [3, N]: the address of its first token, the bytes of an id, and what its ids must be below.
        Fetches what is not here. Raises ShardError where a part contradicts the lengths, RemoteError where one can not
        be had."""
        t = self._open(documents)
        found = np.empty((3, len(documents)), np.int64)
        bad = _locate(
            documents, self.lengths, t.first_row, t.rows, t.offsets, t.values, t.size, t.width, t.limit, found
        )
        if bad >= 0:
            document = int(documents[bad])
            raise ShardError(
                f"{self.file_of(document)}: the offsets of document {document} contradict the lengths index; "
                "the file is damaged"
            )
        return found

    def spans(self, documents: Int64Array) -> Spans | None:
        """Supervised spans of each document; None where the set has none that matter: everything is supervised. Raises
        ShardError where spans are not inside their document or do not ascend; else as `places`."""
        if not self._has_spans:
            return None
        table = self._open(documents)
        found = np.empty((2, len(documents)), np.int64)
        bad = locate_spans(documents, self.lengths, table.first_row, table.spans, found)
        if bad >= 0:
            document = int(documents[bad])
            raise ShardError(
                f"{self.file_of(document)}: the spans (targets) of document {document} are not ascending ranges of its "
                f"{self.lengths[document]} tokens; the file is damaged"
            )
        return Spans(found[0], found[1])

    def part_of(self, document: int) -> int:
        """The part that a document is in."""
        return int(np.searchsorted(self.part_first, document, side="right")) - 1

    def file_of(self, document: int) -> str:
        """The file that a document is in, as messages say it."""
        return self.catalog.name_of(self.catalog.parts[self.part_of(document)])

    def tokens(self, document: int) -> npt.NDArray[Any]:
        """A read-only view of one document's token ids."""
        chunk, row = self._chunk_of(document)
        start, stop = chunk.offsets[row : row + 2].tolist()
        ids = chunk.ids[start:stop]
        ids.flags.writeable = False
        return ids

    def doc_id(self, document: int) -> str:
        """The name that the input gave to a document; where there is none, its file and its number in it."""
        chunk, row = self._chunk_of(document)
        if chunk.columns is not None and "doc_id" in chunk.columns.schema.names:
            return str(chunk.columns.column("doc_id")[row].as_py())
        part = self.part_of(document)
        return f"{self.catalog.parts[part].file}:{document - int(self.part_first[part])}"

    def source_codes(self) -> npt.NDArray[np.uint16]:
        """The source of each document, as a place in `sources`. Raises ShardError for a file without them."""
        if self.catalog.codes is not None:
            return self.catalog.codes
        found = np.zeros(len(self), np.uint16)
        for number, part in enumerate(self.catalog.parts):
            if number in self._bad or not part.rows:
                continue
            if self.arrivals is not None:
                self.arrivals.open([number])
            where = self.catalog.name_of(part)
            codes = [source_codes(chunk.columns, len(self.sources), where) for chunk in self._chunks[number]]
            found[self.part_first[number] : self.part_first[number + 1]] = np.concatenate(codes)
        return found

    def check_checksums(self) -> None:
        """Read every file of the set. Raises ShardError for the first whose bytes are not those the manifest knows,
        unless it is to be left out; ValueError for a format without checksums."""
        if self.catalog.format != "seqmesh":
            raise ValueError(f"verify is true: {self.catalog.location} is {self.catalog.format}: it has no checksums")
        if self._set.in_place is None:
            return  # fetched files are compared with theirs
        paths = {n: self._set.in_place(n)[0] for n in range(len(self.catalog.parts)) if n not in self._bad}
        for number, why in check_checksums(self.catalog, paths).items():
            self._leave_out(number, ShardError(f"{self.catalog.name_of(self.catalog.parts[number])}: {why}"))
            self._chunks.pop(number, None)
        self._table = self._tabled()

    def ready(self, documents: Int64Array) -> bool:
        """Whether these documents can be read at once; if not, what is missing is asked for. Raises as `places` does
        for what can not be had."""
        return self.arrivals is None or self.arrivals.ready(self._parts_of(documents))

    def close(self) -> None:
        if self.arrivals is not None:
            self.arrivals.close()

    def _parts_of(self, documents: Int64Array) -> list[int]:
        found: list[int] = np.unique(np.searchsorted(self.part_first, documents, side="right") - 1).tolist()
        return found

    def _open(self, documents: Int64Array) -> Table:
        """The table, once these documents are in it."""
        if self.arrivals is not None:
            self.arrivals.open(self._parts_of(documents))
            if self._changes != self.arrivals.changes:
                self._changes, self._table = self.arrivals.changes, self._tabled()
        return self._table

    def _open_or_refuse(self, number: int) -> None:
        assert self._set.in_place is not None
        if number in self._bad:
            return
        try:
            self._chunks[number] = self._set.chunks(number, *self._set.in_place(number))
        except ShardError as error:
            self._leave_out(number, error)

    def _leave_out(self, number: int, error: ShardError) -> None:
        if self._reading.bad_shards == "refuse":
            raise error
        log.warning("left out: %s", error)
        self._bad[number] = str(error)

    def _chunk_of(self, document: int) -> tuple[Chunk, int]:
        if not 0 <= document < len(self):
            raise ValueError(f"document is {document}: the set has {len(self)}")
        number = self.part_of(document)
        if number in self._bad:
            raise ShardError(f"document {document} is left out: {self._bad[number]}")
        self._open(np.array([document]))
        row = document - int(self.part_first[number])
        for chunk in self._chunks[number]:
            if row < chunk.rows:
                return chunk, row
            row -= chunk.rows
        raise AssertionError("a part has the rows that its catalog says")

    def _tabled(self) -> Table:
        rows, spans = [], []
        for number, chunks in sorted(self._chunks.items()):
            first = int(self.part_first[number])
            for chunk in chunks:
                limit = min(self.vocab_size, chunk.limit)
                rows.append(
                    (
                        first,
                        chunk.rows,
                        chunk.offsets.ctypes.data,
                        chunk.ids.ctypes.data,
                        len(chunk.ids),
                        chunk.ids.itemsize,
                        limit,
                    )
                )
                spans.append(chunk.spans)
                first += chunk.rows
        c = np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 7).T)
        return Table(c[0], c[1], c[2], c[3], c[4], c[5], c[6], np.array(spans, np.int64).reshape(-1, 5))


@jit
def _locate(
    documents: Int64Array,
    lengths: Int64Array,
    first_row: Int64Array,
    rows: Int64Array,
    offsets: Int64Array,
    values: Int64Array,
    size: Int64Array,
    width: Int64Array,
    limit: Int64Array,
    found: Int64Array,
) -> int:
    """Fill `found` as `ShardSet.places` says; returns the index of the first document that no open chunk has, or whose
    offsets are wrong, or -1. The check keeps a damaged shard from being read outside its memory."""
    for i in range(len(documents)):
        document = documents[i]
        chunk = np.searchsorted(first_row, document, side="right") - 1
        row = document - first_row[chunk]
        if chunk < 0 or row >= rows[chunk]:
            return i
        place = array_at(pointer(offsets[chunk]), (row + 2,), np.int64)
        start, stop = place[row], place[row + 1]
        if start < 0 or stop > size[chunk] or stop - start != lengths[document]:
            return i
        found[ADDRESS, i] = values[chunk] + start * width[chunk]
        found[WIDTH, i], found[LIMIT, i] = width[chunk], limit[chunk]
    return -1
