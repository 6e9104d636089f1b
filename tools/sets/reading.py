"""`InputSet`: a set of any format that the loader reads, at a folder or URL, read once through, block by block.

What is read is checked first: a shard of a shard set against its checksum, so that no command writes damaged documents
to a new set whose checksums are right; ids against the vocabulary. Parts that can not be read in their place are copied
and let go of one at a time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqmesh.loader.catalog import Chunk, Reading
from seqmesh.loader.errors import ShardError
from seqmesh.loader.files import checksum
from seqmesh.loader.formats.detect import open_set
from seqmesh.loader.formats.seqmesh import source_codes
from seqmesh.loader.manifest import MANIFEST_NAME, Manifest, parse_manifest
from seqmesh.loader.storage.cache import Cache
from seqmesh.tools.claim import TOKENIZER_NAMES
from seqmesh.tools.sets.blocks import Block, Codes

BLOCK_TOKENS = 1 << 22  # in one go, about: bounds memory

_PLAIN = Reading()


class InputSet:
    """data: as it was named. catalog: what it holds. Documents come in blocks of at most BLOCK_TOKENS, or of one."""

    def __init__(self, data: str, reading: Reading = _PLAIN) -> None:
        """Raises as `open_set` does."""
        self.data = data
        self._cache = Cache.default()
        self._opened = open_set(data, reading, self._cache)
        self.catalog = self._opened.catalog
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self.catalog.lengths)

    @cached_property
    def manifest(self) -> Manifest:
        """Raises ValueError for a set of another format."""
        location = self.catalog.location
        if self.catalog.format != "seqmesh":
            raise ValueError(f"{self.data} is {self.catalog.format} data: convert it to a shard set first")
        return parse_manifest(location.read(MANIFEST_NAME), str(location.child(MANIFEST_NAME)))

    @property
    def tokens(self) -> int:
        return int(self.catalog.lengths.sum())

    def beside(self, name: str) -> bytes | None:
        """A small file of the set, None where it has none of this name."""
        location = self.catalog.location
        return location.read(name) if location.exists(name) else None

    def tokenizer(self) -> tuple[str, bytes] | None:
        """The name and bytes of the tokenizer that the set keeps, None where it keeps none."""
        found = ((name, self.beside(name)) for name in TOKENIZER_NAMES)
        return next(((name, data) for name, data in found if data is not None), None)

    def blocks(self) -> Iterator[Block]:
        """All documents, in order. Raises ShardError for a part that is damaged, and as `Location.fetch` does."""
        for number in range(len(self.catalog.parts)):
            for block in self.part(number):
                yield from block.cut(BLOCK_TOKENS)

    def part(self, number: int, *, checked: bool = True) -> list[Block]:
        """The documents of a part, as they lie in it. checked: False where no ids are looked at."""
        part, first = self.catalog.parts[number], int(self.catalog.part_first[number])
        where, found = self.catalog.name_of(part), []
        row = first - self._first_of_file(number)
        for chunk in self._chunks(number, checked):
            block = self._block(chunk, first, row, where)
            if checked:
                _check_ids(block, self.catalog.vocab_size, where, row)
            found.append(block)
            first, row = first + len(block), row + len(block)
        return found

    def columns(self) -> list[str]:
        """Names of the columns of the first part that holds documents, as far as they are read; none of Megatron's."""
        for number, part in enumerate(self.catalog.parts):
            for chunk in self._chunks(number, checked=False) if part.rows else ():
                return [] if chunk.columns is None else list(chunk.columns.schema.names)
        return []

    def path(self, number: int) -> Path | None:
        """Where a part lies on this machine, None where it does not."""
        return self._opened.in_place(number)[0] if self._opened.in_place else None

    def codes(self, number: int) -> Codes:
        """The sources of a part's documents, as places in the catalog's."""
        catalog = self.catalog
        if catalog.codes is not None:
            return catalog.codes[catalog.part_first[number] : catalog.part_first[number + 1]]
        return np.concatenate([np.zeros(0, np.uint16), *(block.codes for block in self.part(number, checked=False))])

    def check(self, number: int) -> None:
        """Raises ShardError for a file whose bytes are not those that the manifest knows; other formats know none."""
        part, path = self.catalog.parts[number], self.path(number)
        if number in self._checked or not part.xxh3 or path is None:
            return
        if checksum(path) != part.xxh3:
            raise ShardError(
                f"{path}: is damaged: its checksum differs from the manifest's; seqmesh verify lists all that is wrong"
            )
        self._checked.add(number)

    def _chunks(self, number: int, checked: bool) -> list[Chunk]:
        opened = self._opened
        if opened.in_place is not None:
            if checked:
                self.check(number)
            return opened.chunks(number, *opened.in_place(number))
        self._cache.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".part-{os.getpid()}-", dir=self._cache.folder) as folder:
            path = Path(folder) / opened.name(number)
            opened.bring(number, path)
            return opened.chunks(number, path, 0)  # mapped: the bytes stay as long as anybody needs them

    def _first_of_file(self, number: int) -> int:
        """The number of the first document of a part's file."""
        parts = self.catalog.parts
        while number and parts[number - 1].file == parts[number].file:
            number -= 1
        return int(self.catalog.part_first[number])

    def _block(self, chunk: Chunk, first: int, row: int, where: str) -> Block:
        lengths = self.catalog.lengths[first : first + chunk.rows]
        start, end = int(chunk.offsets[0]), int(chunk.offsets[-1])
        if start < 0 or end > len(chunk.ids) or not np.array_equal(chunk.lengths, lengths):
            raise ShardError(f"{where}: the offsets of its documents contradict what is known of their lengths")
        codes = self.catalog.codes
        return Block(
            first=first,
            ids=chunk.ids[start:end],
            lengths=lengths,
            doc_ids=_doc_ids(chunk, row, where),
            codes=source_codes(chunk.columns, len(self.catalog.sources), where)
            if codes is None
            else codes[first : first + chunk.rows],
            targets=chunk.holds,
        )


def _check_ids(block: Block, vocab_size: int, where: str, row: int) -> None:
    ids = block.ids
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
    row += int(np.searchsorted(np.cumsum(block.lengths), at, side="right"))
    raise ShardError(f"{where}: row {row} holds the id {ids[at]}: must be below vocab_size, {vocab_size}")


def _doc_ids(chunk: Chunk, row: int, where: str) -> Any:
    """Names of a chunk's documents; a document without one is called by its file and its row in that."""
    if chunk.columns is None or "doc_id" not in chunk.columns.schema.names:
        return _made_ids(chunk.rows, row, where)
    column = chunk.columns.column("doc_id")
    try:
        names = column.cast(pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ShardError(f"{where}: doc_id is {column.type}: must be strings or integers") from error
    return pc.coalesce(names, _made_ids(chunk.rows, row, where)) if names.null_count else names


def _made_ids(rows: int, row: int, where: str) -> Any:
    file = where.rpartition("/")[2]
    return pa.array([f"{file}:{row + i}" for i in range(rows)], pa.large_string())
