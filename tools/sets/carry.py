"""Whole shards into another set: linked or copied where nothing in them changes, rewritten where sources do.

Also what such a set is completed with: the lengths index, the manifest, the tokenizer. A shard that is linked keeps its
checksum, so that `seqmesh verify` finds what is wrong with it there, too; one that is copied or rewritten is compared
with its checksum first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.files import atomic_path, atomic_write, checksum, sync_folder
from seqmesh.loader.formats.seqmesh import check_size, open_arrow
from seqmesh.loader.manifest import FileEntry, Manifest
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.claim import QUARANTINE_NAME
from seqmesh.tools.sets.blocks import Codes
from seqmesh.tools.sets.progress import Share
from seqmesh.tools.sets.reading import InputSet
from seqmesh.tools.shard_writer import MAX_SOURCES, shard_name
from seqmesh.tools.tokenizers.fingerprint import template_part, tokenizer_part


@dataclass(slots=True, kw_only=True, eq=False)
class Gathered:
    """Shards of several sets, one after the other, and what the lengths index says of their documents."""

    shards: list[FileEntry] = field(default_factory=list)
    lengths: list[Int64Array] = field(default_factory=list)
    supervised: list[Int64Array] = field(default_factory=list)
    codes: list[Codes] = field(default_factory=list)

    def add(self, entry: FileEntry, given: InputSet, number: int, codes: Codes) -> None:
        """A file that holds the documents of a part of a set, whose sources have these codes in it."""
        chosen = slice(*given.catalog.part_first[number : number + 2].tolist())
        self.shards.append(entry)
        self.lengths.append(given.catalog.lengths[chosen])
        self.supervised.append(given.catalog.supervised[chosen])
        self.codes.append(codes)

    def write_index(self, path: Path) -> FileEntry:
        """The lengths index of all of them."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self.lengths])
        supervised = np.concatenate([np.zeros(0, np.int64), *self.supervised])
        columns = [pa.array(lengths), pa.array(supervised), pa.array(np.concatenate([_NO_CODES, *self.codes]))]
        index = pa.record_batch(columns, names=["length", "supervised", "source"])
        return write_arrow(path, index.schema, [index], int(lengths.sum()))


def check_alike(sets: Sequence[InputSet]) -> None:
    """Raises ValueError where two sets were not made by the same tokenizer in the same way, or hold conversations by
    different templates."""
    first = sets[0]
    for other in sets[1:]:
        for name, (one, two) in _compared(first.manifest, other.manifest).items():
            if one != two:
                raise ValueError(
                    f"{first.data} and {other.data} can not be one set: {name} is {one} in the first and {two} in the "
                    "other; prepare one of them again with the tokenizer of the other"
                )
    _check_templates(sets)


def common_tokenizer(manifests: Sequence[Manifest]) -> str:
    """What is recorded of the tokenizer of sets that are alike: with the template where one of them has it."""
    names = [manifest.tokenizer for manifest in manifests]
    return next(filter(template_part, names), names[0])


def _compared(one: Manifest, two: Manifest) -> dict[str, tuple[Any, Any]]:
    """What must be the same, in both."""
    names = ("vocab_size", "eod_id", "bod_id")
    tokenizers = tokenizer_part(one.tokenizer), tokenizer_part(two.tokenizer)
    return {"tokenizer": tokenizers} | {name: (getattr(one, name), getattr(two, name)) for name in names}


def _check_templates(sets: Sequence[InputSet]) -> None:
    """Documents of text go with any conversations."""
    with_template = [(each, part) for each in sets if (part := template_part(each.manifest.tokenizer))]
    for other, template in with_template[1:]:
        first, common = with_template[0]
        if template != common:
            raise ValueError(
                f"{first.data} and {other.data} can not be one set: their conversations are written by different chat "
                f"templates ({common} in the first, {template} in the other); prepare one of them again with the "
                "template of the other"
            )


def check_not_repeated(groups: Sequence[tuple[str, Sequence[FileEntry]]]) -> None:
    """Raises ValueError where a shard of one set is in another, too: all of its documents would be there twice."""
    seen: dict[str, str] = {}
    for data, entries in groups:
        for entry in entries:
            if entry.rows and entry.xxh3 in seen:
                raise ValueError(
                    f"{data} holds the documents of {entry.file} that {seen[entry.xxh3]} has already: they would be "
                    "there twice; to see data more often, give it a larger weight in the loader's mixture"
                )
        seen |= {entry.xxh3: data for entry in entries}


def united(names: Sequence[str], sets: Iterable[InputSet]) -> tuple[str, ...]:
    """Sources by name: these, then those of the sets that are new, in their order. Raises ValueError for too many."""
    found = dict.fromkeys(names)
    for each in sets:
        found |= dict.fromkeys(each.catalog.sources)
    if len(found) > MAX_SOURCES:
        raise ValueError(f"the sets have {len(found)} sources together: a shard set names at most {MAX_SOURCES}")
    return tuple(found)


def carry_all(given: InputSet, folder: Path, sources: Sequence[str], gathered: Gathered, progress: Share) -> None:
    """All shards of a set that hold documents, into a folder, with the next numbers; their sources as places in
    `sources`. progress: hears the share of the set's shards."""
    places = np.array([sources.index(name) for name in given.catalog.sources], np.uint16)
    for number, part in enumerate(given.catalog.parts):
        if part.rows:
            codes = given.codes(number)
            target = folder / shard_name(len(gathered.shards))
            same = np.array_equal(places[codes], codes)
            entry = carry_same(given, number, target) if same else _rewrite(given, number, target, places)
            gathered.add(entry, given, number, places[codes])
        progress((number + 1) / len(given.catalog.parts))


def carry_same(given: InputSet, number: int, target: Path) -> FileEntry:
    """A shard as it is: a hard link where that can be made, else a copy. Raises ShardError for one that is missing or
    has another size, and for a copy that is damaged."""
    part, path = given.catalog.parts[number], given.path(number)
    if path is not None:
        check_size(path.stat().st_size if path.is_file() else None, part.size, str(path))
    if path is None or not _linked(path, target):
        given.catalog.location.fetch(part.file, target, size=part.size, xxh3=part.xxh3)
    return FileEntry(file=target.name, rows=part.rows, tokens=part.tokens, bytes=part.size, xxh3=part.xxh3)


def write_arrow(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], tokens: int) -> FileEntry:
    """Write an Arrow IPC file, whole or not at all."""
    rows = 0
    with atomic_path(path) as temporary, pa.ipc.new_file(str(temporary), schema) as file:
        for batch in batches:
            file.write_batch(batch)
            rows += batch.num_rows
    return FileEntry(file=path.name, rows=rows, tokens=tokens, bytes=path.stat().st_size, xxh3=checksum(path))


def summed(manifests: Sequence[Manifest]) -> dict[str, int]:
    """What was read for the sets together; what is in them is not counted here."""
    total: dict[str, int] = {}
    for manifest in manifests:
        counts = dict(manifest.counts)
        parts = manifest.documents + counts.get("empty", 0) + counts.get("refused", 0)
        counts.setdefault("documents_in", parts)
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def copy_tokenizer(sets: Iterable[InputSet], folder: Path) -> None:
    """The tokenizer of the first set that has it."""
    found = next(filter(None, (each.tokenizer() for each in sets)), None)
    if found is not None:
        name, data = found
        atomic_write(folder / name, data)


def copy_quarantines(sets: Sequence[InputSet], folder: Path) -> None:
    """The refused records of all sets, one after the other, where each set that refused some still has them."""
    found = [each.beside(QUARANTINE_NAME) for each in sets]
    refused = [each.manifest.counts.get("refused", 0) for each in sets]
    if any(data is not None for data in found) and all(data or not n for data, n in zip(found, refused, strict=True)):
        atomic_write(folder / QUARANTINE_NAME, b"".join(data or b"" for data in found))


_NO_CODES: npt.NDArray[np.uint16] = np.zeros(0, np.uint16)


def _linked(path: Path, target: Path) -> bool:
    """Whether a file could be linked. What another run left under that name is replaced."""
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.link(path.resolve(), temporary)
        temporary.replace(target)
        sync_folder(target.parent)
        return True
    except OSError:  # another disk, or one without links: a copy will do, or say what is wrong
        return False
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _rewrite(given: InputSet, number: int, target: Path, places: Any) -> FileEntry:
    """A shard with other codes of its sources. Raises ShardError for one that is damaged."""
    part, path = given.catalog.parts[number], given.path(number)
    if path is None:
        brought = target.with_name(f"{target.name}.brought.tmp")
        given.catalog.location.fetch(part.file, brought, size=part.size, xxh3=part.xxh3)
    else:
        given.check(number)
        brought = path
    try:
        reader = open_arrow(brought, part.size, given.catalog.name_of(part))
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        return write_arrow(target, reader.schema, (_recoded(batch, places) for batch in batches), part.tokens)
    finally:
        if path is None:
            brought.unlink(missing_ok=True)


def _recoded(batch: pa.RecordBatch, places: Any) -> pa.RecordBatch:
    index = batch.schema.get_field_index("source")
    codes = places[np.asarray(batch.column(index).to_numpy(zero_copy_only=False))]
    return batch.set_column(index, batch.schema.field(index), pa.array(codes, pa.uint16()))
