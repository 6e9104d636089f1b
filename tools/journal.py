"""The journal of an unfinished `prepare`: what is made, from what, and where the next shard begins.

`progress.jsonl` lies in the output folder while a run is unfinished. Its first line, written whole or not at all, is
the `Header`; then comes one `Mark` a finished shard, appended and synced once the shard has its final name. A mark is a
few hundred bytes, so the cost of a shard does not grow with the number of shards. A kill may leave half a line at the
end: it does not count, and its shard is made again.

The last shard of a set has no mark: the manifest follows it. The journal is removed once the manifest is written; a
folder with a journal is unfinished, whatever else is in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.files import atomic_write, sync_folder
from seqmesh.loader.manifest import FileEntry
from seqmesh.tools.inputs import InputFile
from seqmesh.tools.records import Cursor

JOURNAL_NAME = "progress.jsonl"
JOURNAL_FORMAT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMark:
    """One input file: what its documents are called after, and how to know that it is still the same.

    Size and time of change (or the storage's tag), not the content: reading terabytes to learn that nothing changed
    would cost more than many a shard. The folder it is in does not count, so that inputs may move between runs.
    """

    name: str
    source: str
    size: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the bytes of a set: two runs with equal recipes may share a folder, others may not."""

    tokenizer: str  # checksum of the file, or train:SIZE
    eod_token: str | None
    shard_tokens: int
    shuffle_seed: int | None
    max_tokens: int | None
    longest_record: int
    text_column: str
    min_tokens: int | None
    max_document_tokens: int | None
    dedup: bool
    sample: float | None
    seed: int | None  # of the sample, None without one
    inputs: tuple[InputMark, ...]
    bod_token: str | None = None
    parse_special: bool = False
    id_column: str = "id"
    source_column: str = "source"
    keep: tuple[str, ...] = ()
    chat_column: str | None = None
    chat_template: str | None = None  # its fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line. `fingerprint` is that of the tokenizer, whether it was given or trained."""

    recipe: Recipe
    fingerprint: str
    format: int = JOURNAL_FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A finished shard. What is kept, its tokens and its documents, is in the shards themselves."""

    shard: FileEntry
    next: Cursor  # where the first document of the next shard begins
    left_out: dict[str, dict[str, int]]  # since the mark before: of each source, records by what became of them
    text_bytes: int  # of the whole run up to `next`
    quarantine: int  # bytes of the quarantine file
    sources: tuple[str, ...]  # named for the first time in this shard
    texts: str  # checksum of its texts' hashes, empty where duplicates stay


def input_marks(files: Sequence[InputFile]) -> tuple[InputMark, ...]:
    """The inputs as a recipe records them."""
    return tuple(InputMark(name=file.name, source=file.source, size=file.size, version=file.version) for file in files)


def begin(folder: Path, header: Header, marks: Sequence[Mark] = ()) -> None:
    """Write a journal anew, with the marks that a resumed run keeps."""
    atomic_write(folder / JOURNAL_NAME, b"".join([_line(header), *map(_line, marks)]))


def append(folder: Path, mark: Mark) -> None:
    """Record a finished shard. What the mark speaks of must be on the disk."""
    with (folder / JOURNAL_NAME).open("ab") as file:
        file.write(_line(mark))
        file.flush()
        os.fsync(file.fileno())


def remove(folder: Path) -> None:
    """Declare the run finished."""
    (folder / JOURNAL_NAME).unlink()
    sync_folder(folder)


def read(folder: Path) -> tuple[Header, list[Mark]] | None:
    """The journal of an unfinished run, None where there is none. Raises ValueError for a header of another kind."""
    path = folder / JOURNAL_NAME
    if not path.is_file():
        return None
    head, *lines = path.read_bytes().split(b"\n")
    try:
        header = TypeAdapter(Header).validate_json(head)
    except ValidationError:
        header = None
    if header is None or header.format != JOURNAL_FORMAT:
        raise ValueError(
            f"{path} is not the journal of this version of seqmesh: finish the run with the version that began it, or "
            f"delete {folder} and start over"
        )
    return header, list(_marks(lines))


def differences(old: Recipe, new: Recipe) -> list[str]:
    """What differs between two recipes, one phrase each, inputs by name."""
    found = [
        f"{field.name} was {getattr(old, field.name)}, now {getattr(new, field.name)}"
        for field in fields(Recipe)
        if field.name != "inputs" and getattr(old, field.name) != getattr(new, field.name)
    ]
    if old.inputs != new.inputs:
        found.extend(_input_differences(old.inputs, new.inputs))
    return found


def _line(value: Header | Mark) -> bytes:
    return json.dumps(asdict(value), separators=(",", ":")).encode() + b"\n"


def _marks(lines: Sequence[bytes]) -> Iterator[Mark]:
    """Marks up to the first line that is none, such as the half of a line that a kill left at the end."""
    adapter = TypeAdapter(Mark)
    for line in lines:
        try:
            yield adapter.validate_json(line)
        except ValidationError:
            return


def _input_differences(old: Sequence[InputMark], new: Sequence[InputMark]) -> Iterator[str]:
    if [(mark.name, mark.source) for mark in old] != [(mark.name, mark.source) for mark in new]:
        before, now = {mark.name for mark in old}, {mark.name for mark in new}
        for what, names in (("is gone", before - now), ("is new", now - before)):
            yield from (f"input {name} {what}" for name in sorted(names))
        if before == now:
            yield "the inputs are in another order or folder"
        return
    for was, mark in zip(old, new, strict=True):
        if was.size != mark.size:
            yield f"input {mark.name} had {was.size} bytes, now {mark.size}"
        elif was.version != mark.version:
            yield f"input {mark.name} was written again since"
