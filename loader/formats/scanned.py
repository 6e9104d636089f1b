"""Parquet files and Hugging Face saved datasets: what they hold is learned by one pass over all of them.

The pass is made once for a machine: what it found is kept in the cache as an index, under a name that follows from the
data. Parquet can not be read where it lies: each file becomes an Arrow file with ids of 16 or 32 bits, in the cache.
Columns besides that of the ids, where they are there: `source` (names, plain or as a dictionary), `targets` (supervised
spans, see `manifest`), `doc_id`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from seqmesh.loader.catalog import ALL, Catalog, Chunk, FormatName, Part, Reading
from seqmesh.loader.errors import ShardError
from seqmesh.loader.formats.sample import content_sample
from seqmesh.loader.spans import count_supervised, locate_spans
from seqmesh.loader.storage.cache import Cache
from seqmesh.loader.storage.copies import Copies
from seqmesh.loader.storage.location import Location
from seqmesh.loader.storage.once import built_once
from seqmesh.packer.lengths import Int64Array

INDEX_VERSION = 1
METADATA = "seqmesh"
SCAN_SECONDS = 12 * 3600.0  # that another job's pass over the data is waited for
ACCOUNT_SECONDS = 60.0  # for other processes to let go of the cache's account


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A set of files that must be scanned. sizes: bytes by name, in order. opened: the chunks of a local Arrow file;
    the second argument is what messages call it. bring: makes the local Arrow file of a file of the set; None where
    that is one, and here. beside: that the file itself lies beside it meanwhile. options: what else decides its bytes.
    """

    location: Location
    format: FormatName
    sizes: dict[str, int]
    opened: Callable[[Path, str], list[Chunk]]
    bring: Callable[[str, Path], None] | None
    beside: bool = False
    options: str = ""


@dataclass(slots=True, kw_only=True)
class _Found:
    parts: list[Part] = field(default_factory=list)
    lengths: list[Int64Array] = field(default_factory=list)
    supervised: list[Int64Array] = field(default_factory=list)
    codes: list[npt.NDArray[np.uint16]] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)


def catalog(files: Files, reading: Reading, cache: Cache, key: str) -> Catalog:
    """key: see `cache_key`. Raises ShardError for a file that can not be read, unless it is to be left out."""
    path = built_once(
        cache.folder / f"{key}-index.arrow",
        lambda target: _write_index(files, reading, cache, key, target),
        timeout=SCAN_SECONDS,
    )
    return _read_index(path, files, reading, key)


def cache_key(files: Files, reading: Reading) -> str:
    """Names what the cache holds of a set: another for other data, columns or vocabulary."""
    decides = f"{INDEX_VERSION} {files.format} {files.options} {reading.column} {reading.bad_shards} "
    return str(xxhash.xxh3_128_hexdigest((decides + content_sample(files.location, files.sizes)).encode()))


def local_name(key: str, number: int) -> str:
    """File of the cache that holds a part."""
    return f"{key}-{number:06d}.arrow"


def _write_index(files: Files, reading: Reading, cache: Cache, key: str, target: Path) -> None:
    found = _Found()
    for number, name in enumerate(files.sizes):
        try:
            with _local(files, name, cache, local_name(key, number)) as path:
                _scan(files, name, path, found)
        except ShardError as error:
            if reading.bad_shards == "refuse":
                raise
            found.bad[number] = str(error)
            found.parts.append(Part(file=name, rows=0, tokens=0, size=files.sizes[name], kept=0))
    about = {"parts": [asdict(p) for p in found.parts], "sources": list(found.sources), "bad": found.bad}
    columns = {
        "length": np.concatenate([np.zeros(0, np.int64), *found.lengths]),
        "supervised": np.concatenate([np.zeros(0, np.int64), *found.supervised]),
        "source": np.concatenate([np.zeros(0, np.uint16), *found.codes]),
    }
    table = pa.table(columns).replace_schema_metadata({METADATA: json.dumps(about)})
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


@contextlib.contextmanager
def _local(files: Files, name: str, cache: Cache, kept_as: str) -> Iterator[Path]:
    """The local Arrow file of a file of the set. One that had to be made stays in the cache if there is room."""
    if files.bring is None:
        yield files.location.path / name
        return
    made = cache.folder / f".{kept_as}.scanned"
    try:
        files.bring(name, made)
        yield made
        Copies(cache.folder, cache.limit, ACCOUNT_SECONDS).adopt(kept_as, made)
    finally:
        made.unlink(missing_ok=True)


def _scan(files: Files, name: str, path: Path, found: _Found) -> None:
    """Add what a file holds. Nothing is added where it can not be read."""
    where = str(files.location.child(name))
    chunks = files.opened(path, where)
    supervised = [_supervised(chunk, where) for chunk in chunks]
    names = [_source_names(chunk, where) for chunk in chunks]
    lengths = [chunk.lengths for chunk in chunks]
    rows, tokens = sum(map(len, lengths)), sum(int(each.sum()) for each in lengths)
    kept = path.stat().st_size + files.sizes[name] * files.beside
    found.parts.append(Part(file=name, rows=rows, tokens=tokens, size=files.sizes[name], kept=kept))
    found.lengths += lengths
    found.supervised += supervised
    found.codes += [_codes(each, found.sources) for each in names]


def _supervised(chunk: Chunk, where: str) -> Int64Array:
    """Labels that count of each document. Raises ShardError for lists or spans that are damaged."""
    lengths = chunk.lengths
    if len(lengths) and (lengths.min() < 0 or chunk.offsets[0] < 0 or chunk.offsets[-1] > len(chunk.ids)):
        raise ShardError(f"{where}: is damaged: its lists are not ranges of its {len(chunk.ids)} ids")
    documents, found = np.arange(len(lengths)), np.empty((2, len(lengths)), np.int64)
    table = np.array([chunk.spans], np.int64)
    bad = locate_spans(documents, lengths, np.zeros(1, np.int64), table, found)
    if bad >= 0:
        raise ShardError(
            f"{where}: the spans (targets) of row {bad} of a record batch are not ascending ranges of its "
            f"{lengths[bad]} tokens"
        )
    return np.asarray(count_supervised(found[0], found[1], np.zeros_like(lengths), lengths))


def _source_names(chunk: Chunk, where: str) -> Any:
    """The column of sources as a dictionary of names, whose codes mean something else in each chunk."""
    names = chunk.columns.schema.names
    if "source" not in names:
        return pa.array([ALL] * chunk.rows, pa.string()).dictionary_encode()
    column = chunk.columns.column("source")
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    if encoded.null_count or not pa.types.is_string(encoded.type.value_type):
        kind = "has nulls" if encoded.null_count else f"is {column.type}"
        raise ShardError(f"{where}: source {kind}: must be names")
    return encoded


def _codes(encoded: Any, sources: dict[str, int]) -> npt.NDArray[np.uint16]:
    """Codes that mean the same in every chunk; adds names that are new."""
    places = [sources.setdefault(str(name), len(sources)) for name in encoded.dictionary.to_pylist()]
    return np.asarray(np.array(places, np.uint16)[encoded.indices.to_numpy(zero_copy_only=False)])


def _read_index(path: Path, files: Files, reading: Reading, key: str) -> Catalog:
    assert reading.vocab_size is not None
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    about = json.loads(table.schema.metadata[METADATA.encode()])
    lengths = np.asarray(table["length"].to_numpy(), np.int64)
    return Catalog(
        location=files.location,
        format=files.format,
        parts=tuple(Part(**part) for part in about["parts"]),
        lengths=lengths,
        supervised=np.asarray(table["supervised"].to_numpy(), np.int64),
        sources=tuple(about["sources"]) or (ALL,),
        codes=np.asarray(table["source"].to_numpy(), np.uint16),
        vocab_size=reading.vocab_size,
        fingerprint=xxhash.xxh3_128(lengths.tobytes() + key.encode()).hexdigest(),
        column=reading.column,
        bad={int(number): why for number, why in about["bad"].items()},
    )
