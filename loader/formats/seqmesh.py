"""Shard sets: a manifest, a lengths index, Arrow IPC files. See `manifest` for the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from seqmesh.loader.catalog import Catalog, Chunk, Part, Reading
from seqmesh.loader.chunks import SPAN_TYPE, chunk_of, is_span_type
from seqmesh.loader.errors import ShardError
from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import MANIFEST_NAME, FileEntry, Manifest, parse_manifest, token_dtype
from seqmesh.loader.storage.cache import Cache
from seqmesh.loader.storage.location import Location
from seqmesh.loader.storage.once import built_once


def catalog(location: Location, reading: Reading, cache: Cache) -> Catalog:
    """Raises ValueError for an unfit manifest or another vocabulary than the reading's, ShardError for an unfit lengths
    index."""
    manifest = parse_manifest(location.read(MANIFEST_NAME), str(location.child(MANIFEST_NAME)))
    if reading.vocab_size not in (None, manifest.vocab_size):
        raise ValueError(f"vocab_size is {reading.vocab_size}: {location} has a vocabulary of {manifest.vocab_size}")
    columns = _lengths_index(location, manifest.lengths, cache)
    return Catalog(
        location=location,
        format="seqmesh",
        parts=tuple(_part(entry) for entry in manifest.shards),
        lengths=columns["length"],
        supervised=columns["supervised"],
        sources=manifest.sources,
        codes=_checked_codes(columns.get("source"), manifest, str(location.child(manifest.lengths.file))),
        vocab_size=manifest.vocab_size,
        fingerprint=xxhash.xxh3_128("".join(shard.xxh3 for shard in manifest.shards).encode()).hexdigest(),
    )


def chunks(path: Path, number: int, catalog: Catalog) -> list[Chunk]:
    """The documents of a shard. Raises ShardError where it is not what the manifest says."""
    part = catalog.parts[number]
    where = catalog.name_of(part)
    reader = open_arrow(path, part.size, where)
    _check_schema(reader.schema, pa.large_list(pa.from_numpy_dtype(token_dtype(catalog.vocab_size))), where)
    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    if sum(batch.num_rows for batch in batches) != part.rows:
        raise ShardError(f"{where}: does not hold the {part.rows} rows the manifest gives")
    return [chunk_of(batch, "input_ids", where) for batch in batches if batch.num_rows]


def check_checksums(catalog: Catalog, paths: dict[int, Path]) -> dict[int, str]:
    """Read whole parts: of those whose bytes are not what the manifest knows, what is wrong."""
    return {
        number: "is damaged: its checksum differs from the manifest's"
        for number, path in paths.items()
        if checksum(path) != catalog.parts[number].xxh3
    }


def check_listed(catalog: Catalog, files: dict[str, int], reading: Reading) -> Catalog:
    """The same with the shards noted as bad that a listing (bytes by name) lacks, or has with another size. Raises
    ShardError for the first of them, unless they are to be left out."""
    bad: dict[int, str] = {}
    for number, part in enumerate(catalog.parts):
        try:
            check_size(files.get(part.file), part.size, catalog.name_of(part))
        except ShardError as error:
            if reading.bad_shards == "refuse":
                raise
            bad[number] = str(error)
    return replace(catalog, bad=bad)


def check_size(found: int | None, size: int, where: str) -> None:
    """found: bytes of a file; None: there is none. Raises ShardError where that is not as the manifest says."""
    if found is None:
        raise ShardError(f"{where}: is missing; the manifest lists it")
    if found != size:
        raise ShardError(f"{where}: has {found} bytes, the manifest says {size}; copy or prepare it again")


def open_arrow(path: Path, size: int, where: str) -> pa.ipc.RecordBatchFileReader:
    """Memory-map one Arrow IPC file of a set. Raises ShardError where it is missing, truncated or no Arrow file."""
    check_size(path.stat().st_size if path.is_file() else None, size, where)
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardError(f"{where}: is not an Arrow file: {error}") from error


def source_codes(columns: pa.RecordBatch, known: int, where: str) -> npt.NDArray[np.uint16]:
    """The source of each document of a chunk. Raises ShardError for a file whose column is of another type (a
    dictionary, say, whose codes mean something else in each chunk), or has other codes."""
    found = columns.schema.field("source").type if "source" in columns.schema.names else None
    if found != pa.uint16():
        raise ShardError(f"{where}: source is {found}: must be uint16")
    codes = np.asarray(columns.column("source").to_numpy(zero_copy_only=False))
    if codes.dtype != np.uint16 or int(codes.max()) >= known:  # nulls come as floats
        raise ShardError(f"{where}: has a document whose source is none of the manifest's {known}")
    return codes


def _part(entry: FileEntry) -> Part:
    size = entry.bytes
    return Part(file=entry.file, rows=entry.rows, tokens=entry.tokens, size=size, kept=size, xxh3=entry.xxh3)


def _lengths_index(location: Location, entry: FileEntry, cache: Cache) -> dict[str, Any]:
    where = str(location.child(entry.file))
    if location.is_local:
        path = location.path / entry.file
    else:
        path = built_once(
            cache.folder / f"{entry.xxh3}-lengths.arrow",
            lambda target: location.fetch(entry.file, target, size=entry.bytes, xxh3=entry.xxh3),
        )
    table = open_arrow(path, entry.bytes, where).read_all()
    columns: dict[str, Any] = {}
    for name in ("length", "supervised"):
        if name not in table.schema.names or table.schema.field(name).type != pa.int64():
            raise ShardError(f"{where}: has no int64 column {name!r}")
        columns[name] = np.asarray(table[name].to_numpy(), np.int64)
    if len(columns["length"]) != entry.rows or int(columns["length"].sum()) != entry.tokens:
        raise ShardError(f"{where}: does not hold the rows and tokens the manifest gives")
    if "source" in table.schema.names:
        columns["source"] = table.select(["source"])
    return columns


def _checked_codes(table: pa.Table | None, manifest: Manifest, where: str) -> npt.NDArray[np.uint16] | None:
    """The column of sources, where the index has one; older sets have it in their shards only."""
    if table is None:
        return np.zeros(manifest.documents, np.uint16) if len(manifest.sources) == 1 else None
    parts = [source_codes(batch, len(manifest.sources), where) for batch in table.to_batches() if batch.num_rows]
    return np.concatenate([np.zeros(0, np.uint16), *parts])


def _check_schema(schema: pa.Schema, expected: Any, where: str) -> None:
    found = schema.field("input_ids").type if "input_ids" in schema.names else None
    if not (found and pa.types.is_large_list(found) and found.value_type == expected.value_type):
        raise ShardError(f"{where}: input_ids is {found}: the manifest says {expected}")
    if "targets" in schema.names and not is_span_type(schema.field("targets").type):
        raise ShardError(f"{where}: targets is {schema.field('targets').type}: must be {SPAN_TYPE}")
