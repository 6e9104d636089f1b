"""Writes a shard set: token ids in, Arrow files, lengths index and manifest out.

The layout is the one `seqmesh.loader.manifest` describes. Every id is checked against the vocabulary before it is
narrowed to 16 or 32 bits. A shard ends before the document that would take it past the token budget, so the files
depend on the documents and the budget only, never on how many documents each call brings. A shard has the column
`targets` where any of its documents has supervised spans, and `metadata` where any has some. A file appears under its
final name when it is whole, and the manifest comes last: a folder without a manifest is not a set.

A writer holds nothing at the end of a shard but what `Finished` says, so an interrupted set is continued at any shard.
Not done here: tokenising, dropping empty documents (they are refused), knowing where an interrupted run stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.chunks import SPAN_TYPE
from seqmesh.loader.files import atomic_path, checksum
from seqmesh.loader.manifest import LENGTHS_NAME, MANIFEST_NAME, FileEntry, Manifest, token_dtype, write_manifest
from seqmesh.packer.lengths import Int64Array, as_lengths
from seqmesh.tools.columns import lists, numbers, strings
from seqmesh.tools.targets import Int32Array, all_labels, flat_spans, supervised_in

DEFAULT_SHARD_TOKENS = 1 << 25  # 64 or 128 MiB of ids a file, which the writer holds in memory
MAX_SOURCES = 1 << 16  # the column `source` has 16 bits

IdArray = npt.NDArray[np.integer[Any]]


def shard_name(index: int) -> str:
    """File name of the shard with this number, counted from 0."""
    return f"shard-{index:05d}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The shards of a set that is to be continued: their entries, their documents' lengths, the sources in order.
    codes: of each document's source. supervised: labels of each document that count, to be given where a shard has
    targets."""

    shards: tuple[FileEntry, ...] = ()
    lengths: tuple[Int64Array, ...] = ()  # one array a shard
    codes: tuple[npt.NDArray[np.uint16], ...] = ()  # as many
    supervised: tuple[Int64Array, ...] = ()  # as many, or none: all labels of all documents
    sources: tuple[str, ...] = ()


class ShardWriter:
    """Collects documents and writes a shard whenever `shard_tokens` are reached.

    Use it in a `with` block: leaving the block writes the rest, the lengths index and the manifest; an exception
    leaves finished shards but no manifest. `counts` goes into the manifest; fill it before the block ends (the writer
    itself sets `documents_out` and `tokens_out`). With `shuffle_seed` the documents of each shard are written in an
    order drawn from the seed and the shard's number. Raises FileExistsError where the folder already holds a finished
    set, OSError naming the file when the disk refuses.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        tokenizer: str,
        eod_id: int | None,
        bod_id: int | None = None,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        shuffle_seed: int | None = None,
        finished: Finished | None = None,
    ) -> None:
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens is {shard_tokens}: must be at least 1")
        for what, id in (("eod_id", eod_id), ("bod_id", bod_id)):
            if id is not None and not 0 <= id < vocab_size:
                raise ValueError(f"{what} is {id}: not in a vocabulary of {vocab_size}")
        finished = finished or Finished()
        if [len(codes) for codes in finished.codes] != [len(lengths) for lengths in finished.lengths]:
            raise ValueError("finished has not as many codes as lengths: each document has a source")
        if (folder / MANIFEST_NAME).exists():
            raise FileExistsError(f"{folder} already holds a finished shard set: choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self.counts: dict[str, int] = {}
        self._folder = folder
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eod_id, self._bod_id = eod_id, bod_id
        self._shard_tokens = shard_tokens
        self._shuffle_seed = shuffle_seed
        self._sources = {name: index for index, name in enumerate(finished.sources)}
        self._shards = list(finished.shards)
        self._lengths = list(finished.lengths)  # of every document so far, for the index
        self._every_code = list(finished.codes)
        self._supervised = list(finished.supervised or map(all_labels, finished.lengths))
        self._documents = sum(map(len, finished.lengths))
        self._manifest: Manifest | None = None
        self._room: IdArray = np.empty(0, self._dtype)  # for the ids of one shard after the other
        self._start_shard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def add(
        self,
        ids: npt.ArrayLike,
        *,
        lengths: npt.ArrayLike,
        doc_ids: Sequence[str],
        sources: Sequence[str],
        targets: Sequence[npt.ArrayLike | None] | None = None,
        metadata: Sequence[str | None] | None = None,
    ) -> None:
        """Add documents: `ids` holds the tokens of all of them one after the other, `lengths` how many each has.

        `doc_ids` and `sources` (names) have one entry per document, and so has `targets`: pairs [S, 2] of start and end
        of the token ranges that are to be learned, None for the whole document. `metadata` is text that goes along,
        which nobody reads but people. Raises ValueError, naming the document and the position, for an id outside the
        vocabulary, for spans that do not ascend or reach beyond the document, and for an empty document; nothing of the
        call is kept then.
        """
        flat = np.asarray(ids)
        sizes = as_lengths(lengths)
        self._check(flat, sizes, doc_ids, sources)
        spans = self._spans(targets, sizes, doc_ids)
        notes = [None] * len(sizes) if metadata is None else list(metadata)
        if len(notes) != len(sizes):
            raise ValueError(f"{len(sizes)} lengths, {len(notes)} metadata: must be as many")
        codes = self._source_codes(sources)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        for number, (first, last) in enumerate(pairwise((0, *self.cuts(sizes), len(sizes)))):
            if number:
                self.end_shard()
            if first == last:
                continue
            self._hold(flat[starts[first] : starts[last]])
            self._sizes.append(sizes[first:last])
            self._doc_ids.extend(doc_ids[first:last])
            self._codes.append(codes[first:last])
            self._targets.extend(spans[first:last])
            self._metadata.extend(notes[first:last])
            self._documents += last - first

    def cuts(self, sizes: Int64Array) -> list[int]:
        """Where documents of these sizes, added now, would be cut: the numbers of those that begin a new shard.

        A shard takes documents up to its budget. A document larger than that is a shard of its own.
        """
        ends = np.cumsum(sizes)
        found: list[int] = []
        first, pending = 0, self._pending_tokens
        while first < len(sizes):
            done = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, done + self._shard_tokens - pending, side="right"))
            if last == first and pending == 0:
                last = first + 1
            if last < len(sizes):
                found.append(last)
            first, pending = last, 0
        return found

    def end_shard(self) -> FileEntry:
        """Write the documents that are pending as a shard, whether or not it is full."""
        sizes = _join(self._sizes, np.int64)
        codes = _join(self._codes, np.uint16)
        batch = _shard_batch(self._room[: self._pending_tokens], sizes, self._doc_ids, codes)
        if any(spans is not None for spans in self._targets):
            column = pa.array(self._targets, SPAN_TYPE)
            batch = batch.append_column("targets", column)
            supervised = supervised_in(column, sizes)
        else:
            supervised = all_labels(sizes)
        if any(note is not None for note in self._metadata):
            batch = batch.append_column("metadata", pa.array(self._metadata, pa.large_string()))
        if self._shuffle_seed is not None:
            order = _drawn(len(sizes), self._shuffle_seed, len(self._shards))
            batch, sizes, supervised, codes = batch.take(numbers(order)), sizes[order], supervised[order], codes[order]
        self._shards.append(_write(self._folder / shard_name(len(self._shards)), batch, int(sizes.sum())))
        self._lengths.append(sizes)
        self._supervised.append(supervised)
        self._every_code.append(codes)
        self._start_shard()
        return self._shards[-1]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources so far, in order of appearance."""
        return tuple(self._sources)

    def finish(self) -> Manifest:
        """Write what is pending, the lengths index and the manifest. A second call only returns the manifest."""
        if self._manifest is None:
            if self._sizes or not self._shards:  # a set without documents has one shard without rows
                self.end_shard()
            sizes, supervised = _join(self._lengths, np.int64), _join(self._supervised, np.int64)
            columns = [numbers(sizes), numbers(supervised), numbers(_join(self._every_code, np.uint16))]
            index = pa.record_batch(columns, names=["length", "supervised", "source"])
            lengths = _write(self._folder / LENGTHS_NAME, index, int(sizes.sum()))
            counts = {**self.counts, "documents_out": lengths.rows, "tokens_out": lengths.tokens}
            self._manifest = Manifest(
                token_dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
                vocab_size=self._vocab_size,
                tokenizer=self._tokenizer,
                eod_id=self._eod_id,
                bod_id=self._bod_id,
                sources=tuple(self._sources),
                shards=tuple(self._shards),
                lengths=lengths,
                counts=counts,
            )
            write_manifest(self._folder, self._manifest)
        return self._manifest

    def _start_shard(self) -> None:
        self._pending_tokens = 0
        if len(self._room) > self._shard_tokens:  # of a document that was a shard of its own
            self._room = np.empty(0, self._dtype)
        self._sizes: list[Int64Array] = []
        self._doc_ids: list[str] = []
        self._codes: list[npt.NDArray[np.uint16]] = []
        self._targets: list[Int32Array | None] = []
        self._metadata: list[str | None] = []

    def _hold(self, ids: IdArray) -> None:
        """Put ids behind those that are pending."""
        end = self._pending_tokens + len(ids)
        if end > len(self._room):
            wanted = max(2 * len(self._room), DEFAULT_SHARD_TOKENS)  # which takes memory only as it is written to
            room = np.empty(max(end, min(wanted, self._shard_tokens)), self._dtype)
            room[: self._pending_tokens] = self._room[: self._pending_tokens]
            self._room = room
        self._room[self._pending_tokens : end] = ids
        self._pending_tokens = end

    def _check(self, flat: IdArray, sizes: Int64Array, doc_ids: Sequence[str], sources: Sequence[str]) -> None:
        if flat.ndim != 1 or (flat.size and flat.dtype.kind not in "iu"):
            raise ValueError(f"ids have dtype {flat.dtype} and {flat.ndim} dimensions: must be integers in one")
        if not len(sizes) == len(doc_ids) == len(sources):
            raise ValueError(f"{len(sizes)} lengths, {len(doc_ids)} doc_ids, {len(sources)} sources: must be as many")
        if sizes.sum() != flat.size:
            raise ValueError(f"lengths add up to {sizes.sum()}: there are {flat.size} ids")
        if sizes.size and sizes.min() == 0:
            raise ValueError(f"document {doc_ids[int(sizes.argmin())]!r} is empty: drop such documents first")
        if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= self._vocab_size):
            self._refuse_id(flat, sizes, doc_ids)

    def _refuse_id(self, flat: IdArray, sizes: Int64Array, doc_ids: Sequence[str]) -> None:
        where = int(np.argmax((flat < 0) | (flat >= self._vocab_size)))
        document = int(np.searchsorted(np.cumsum(sizes), where, side="right"))
        position = where - int(sizes[:document].sum())
        raise ValueError(
            f"document {doc_ids[document]!r} (number {self._documents + document} of the set), position {position}: "
            f"token id {int(flat[where])} is outside the vocabulary of {self._vocab_size}"
        )

    def _spans(
        self, targets: Sequence[npt.ArrayLike | None] | None, sizes: Int64Array, doc_ids: Sequence[str]
    ) -> list[Int32Array | None]:
        """The flat spans of each document, checked."""
        if targets is None:
            return [None] * len(sizes)
        if len(targets) != len(sizes):
            raise ValueError(f"{len(sizes)} lengths, {len(targets)} targets: must be as many")
        found: list[Int32Array | None] = []
        for number, (pairs, size) in enumerate(zip(targets, sizes.tolist(), strict=True)):
            try:
                found.append(None if pairs is None else flat_spans(pairs, size))
            except ValueError as error:
                where = f"document {doc_ids[number]!r} (number {self._documents + number} of the set)"
                raise ValueError(f"{where}: {error}") from error
        return found

    def _source_codes(self, sources: Sequence[str]) -> npt.NDArray[np.uint16]:
        for name in dict.fromkeys(sources):
            self._sources.setdefault(name, len(self._sources))
        if len(self._sources) > MAX_SOURCES:
            raise ValueError(f"more than {MAX_SOURCES} sources: a shard set names at most that many")
        return np.fromiter((self._sources[name] for name in sources), np.uint16, len(sources))


def write_shards(
    folder: Path,
    documents: Sequence[npt.ArrayLike],
    *,
    vocab_size: int = 1 << 16,
    doc_ids: Sequence[str] | None = None,
    sources: Sequence[str] | None = None,
    targets: Sequence[npt.ArrayLike | None] | None = None,
    tokenizer: str = "none",
    eod_id: int | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> Manifest:
    """Write a whole set from lists of token ids. Ids of documents default to "0", "1", ...; the source to "all";
    targets, see `ShardWriter.add`, to everything."""
    # An empty list would become an array of floats.
    arrays = [np.asarray(document) if np.size(document) else np.zeros(0, np.int64) for document in documents]
    names = list(doc_ids) if doc_ids is not None else [str(index) for index in range(len(arrays))]
    writer = ShardWriter(folder, vocab_size=vocab_size, tokenizer=tokenizer, eod_id=eod_id, shard_tokens=shard_tokens)
    with writer:
        writer.counts["documents_in"] = len(arrays)
        flat = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        lengths = [array.size for array in arrays]
        writer.add(flat, lengths=lengths, doc_ids=names, sources=sources or ["all"] * len(arrays), targets=targets)
    return writer.finish()


def _drawn(documents: int, seed: int, shard: int) -> Int64Array:
    """The order of a shard's documents."""
    from seqmesh.packer.permute import permutation, shuffle_key  # compiled: only where it is wanted

    return permutation(documents, shuffle_key(seed, shard))


def _join(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _shard_batch(
    ids: IdArray, sizes: Int64Array, doc_ids: Sequence[str], codes: npt.NDArray[np.uint16]
) -> pa.RecordBatch:
    columns: dict[str, pa.Array[Any]] = {
        "input_ids": lists(ids, sizes),
        "doc_id": strings(doc_ids),
        "source": numbers(codes),
    }
    return pa.record_batch(list(columns.values()), names=list(columns))


def _write(path: Path, batch: pa.RecordBatch, tokens: int) -> FileEntry:
    """Write one record batch as an Arrow IPC file, whole or not at all."""
    try:
        with atomic_path(path) as temporary, pa.ipc.new_file(str(temporary), batch.schema) as file:
            file.write_batch(batch)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    return FileEntry(file=path.name, rows=batch.num_rows, tokens=tokens, bytes=path.stat().st_size, xxh3=checksum(path))
