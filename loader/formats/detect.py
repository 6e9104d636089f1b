"""Which format a set is in, and one way to open it whatever that is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from seqmesh.loader.catalog import Catalog, Chunk, Reading
from seqmesh.loader.formats import huggingface, megatron, scanned, seqmesh
from seqmesh.loader.formats.scanned import Files
from seqmesh.loader.manifest import MANIFEST_NAME
from seqmesh.loader.storage.cache import Cache
from seqmesh.loader.storage.location import Location

SHARDS, PARQUET, HUGGING_FACE, MEGATRON = "a shard set", "Parquet files", "a Hugging Face dataset", "Megatron datasets"
FORMATS = "a shard set, Parquet files, a Hugging Face saved dataset, Megatron .bin and .idx"
ENDING = ".parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSet:
    """A set, and how its parts are read, by number. in_place: where a part lies on this machine, and from which byte
    on; None where it must be brought first. bring: makes a copy of it at a path, whole or not at all; its name in the
    cache is `name`. chunks: its documents, from a path and the byte where they begin."""

    catalog: Catalog
    in_place: Callable[[int], tuple[Path, int]] | None
    name: Callable[[int], str]
    bring: Callable[[int, Path], None]
    chunks: Callable[[int, Path, int], list[Chunk]]


def find_set(data: str, reading: Reading) -> tuple[Location, dict[str, int], str]:
    """Where a set is, the sizes of its files by name, and what it is, in words. Raises FileNotFoundError where there is
    none, ValueError where something must be said that the format does not say; nothing is opened."""
    location, files = _files(Location(data))
    if MANIFEST_NAME in files:
        return location, files, SHARDS
    if huggingface.SPLITS_NAME in files:
        raise ValueError(f"{location} holds several splits: name the folder of one of them")
    kind = _kind_of(files)
    if not kind:
        raise FileNotFoundError(
            f"{data} is not a finished shard set: it has no {MANIFEST_NAME}; nor is it any other of {FORMATS}"
        )
    if reading.vocab_size is None:
        raise ValueError(f"vocab_size is missing: {data} holds {kind}, which does not say it")
    return location, files, kind


def open_set(data: str, reading: Reading, cache: Cache) -> OpenSet:
    """Raises as `find_set` does, and ShardError for an unfit file."""
    location, files, kind = find_set(data, reading)
    if kind == SHARDS:
        catalog = seqmesh.catalog(location, reading, cache)
        is_listed = not location.is_local and len(files) > 1
        return _shard_set(seqmesh.check_listed(catalog, files, reading) if is_listed else catalog)
    if kind == MEGATRON:
        return _megatron(megatron.catalog(location, megatron.pairs(files), files, reading))
    if kind == PARQUET:
        from seqmesh.loader.formats import parquet  # a twentieth of a second, which others need not wait for

        return _scanned(parquet.files_of(location, _parquet(files), reading), reading, cache)
    return _scanned(huggingface.files_of(location, files, reading), reading, cache)


def _files(location: Location) -> tuple[Location, dict[str, int]]:
    """The folder, and the files in it that are meant: all, one Parquet file, or those of the Megatron dataset NAME, for
    which NAME.bin and NAME.idx are good names, too. Of a server that lists nothing, no more than what is asked for."""
    try:
        found = location.files()
    except (FileNotFoundError, NotADirectoryError):
        found = {}
    if found and set(found) != {location.name}:  # object stores list a file as the only one of itself
        return location, found
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return location, {MANIFEST_NAME: location.size(MANIFEST_NAME)}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        folder, name = location.parent, location.name
        stem = name[:-4] if name.endswith((".bin", ".idx")) else name
        chosen = (name,) if name.endswith(ENDING) else (f"{stem}.idx", f"{stem}.bin")
        return folder, {each: folder.size(each) for each in chosen}
    return location, {}


def _kind_of(files: dict[str, int]) -> str:
    """Empty for none."""
    if huggingface.STATE_NAME in files:
        return HUGGING_FACE
    return PARQUET if _parquet(files) else MEGATRON if megatron.pairs(files) else ""


def _parquet(files: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sorted(files.items()) if name.endswith(ENDING)}


def _shard_set(catalog: Catalog) -> OpenSet:
    return OpenSet(
        catalog=catalog,
        in_place=_files_in_place(catalog),
        name=lambda number: f"{catalog.parts[number].xxh3}.arrow",
        bring=partial(_fetch, catalog),
        chunks=lambda number, path, _start: seqmesh.chunks(path, number, catalog),
    )


def _megatron(catalog: Catalog) -> OpenSet:
    return OpenSet(
        catalog=catalog,
        in_place=_files_in_place(catalog),
        name=lambda number: f"{catalog.fingerprint}-{number:06d}.bin",
        bring=partial(_fetch, catalog),
        chunks=lambda number, path, start: megatron.chunks(path, number, catalog, start),
    )


def _fetch(catalog: Catalog, number: int, target: Path) -> None:
    part = catalog.parts[number]
    catalog.location.fetch(part.file, target, start=part.start, size=part.size, xxh3=part.xxh3)


def _scanned(files: Files, reading: Reading, cache: Cache) -> OpenSet:
    key = scanned.cache_key(files, reading)
    catalog = scanned.catalog(files, reading, cache, key)
    bring = files.bring or files.location.fetch
    return OpenSet(
        catalog=catalog,
        in_place=_files_in_place(catalog) if files.bring is None else None,
        name=partial(scanned.local_name, key),
        bring=lambda number, target: bring(catalog.parts[number].file, target),
        chunks=lambda number, path, _start: files.opened(path, catalog.name_of(catalog.parts[number])),
    )


def _files_in_place(catalog: Catalog) -> Callable[[int], tuple[Path, int]] | None:
    if not catalog.location.is_local:
        return None
    folder = catalog.location.path
    return lambda number: (folder / catalog.parts[number].file, catalog.parts[number].start)
