"""What readers of documents give: records, each a `Document` or a `BadRecord`, and the place where each begins.

A place is what a message names, and, as a `Cursor`, where a later run can begin to read. The rules about the fields of
a document (text, id, source) are here, so that they are the same in every kind of input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seqmesh.tools.chat.messages import Message, messages_of, text_of
from seqmesh.tools.inputs import InputFile

RAW_BYTES = 1 << 16  # how much of a bad record is kept
LONGEST_RECORD = 1 << 28  # bytes of a line or a text; longer ones are refused without being held in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The beginning of a record, in numbers. `START` is the beginning of the first file.

    file: its number among the inputs. record: lines or rows of that file before it. offset: in JSONL the bytes before
    it, once decompressed; elsewhere 0.
    """

    file: int
    record: int
    offset: int


START = Cursor(file=0, record=0, offset=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which fields or columns of a record hold what. `id` and `source` may be missing in a record as long as they have
    these names; others must be there.

    chat: conversations, which are then read instead of texts. keep: carried along into the set as metadata.
    """

    text: str = "text"
    id: str = "id"
    source: str = "source"
    chat: str | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if doubled := next((name for name in self.keep if self.keep.count(name) > 1), None):
            raise ValueError(f"keep names {doubled} twice")

    @property
    def plain(self) -> bool:
        """Whether there is nothing to know of a record but a text, and a name and a source where it has them."""
        return self.chat is None and not self.keep and self.id == "id" and self.source == "source"

    @property
    def content(self) -> str:
        """Where a document's text or conversation is."""
        return self.text if self.chat is None else self.chat

    @property
    def needed(self) -> tuple[str, ...]:
        """Those that every record must have."""
        named = [name for name, usual in ((self.id, "id"), (self.source, "source")) if name != usual]
        return tuple(dict.fromkeys((self.content, *named)))

    @property
    def all(self) -> tuple[str, ...]:
        """Those that are read where they are there."""
        return tuple(dict.fromkeys((self.content, self.id, self.source, *self.keep)))


PLAIN = Columns()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A stretch of one file to read: from the first record that begins at `start` or later, to the end or to the last
    record that begins before `stop`.

    base: size of all inputs before the file. longest: bytes of a record, with its line feed. stop: counts as the cursor
    does, bytes in files of lines, rows in tables; files of text are never cut. data: the bytes of the stretch, whole
    lines, where they are read already. continues: whether records are counted from the beginning of the stretch,
    because nobody knows yet how many come before it.
    """

    file: InputFile
    start: Cursor
    base: int
    columns: Columns = PLAIN
    longest: int = LONGEST_RECORD
    stop: int | None = None
    data: bytes | None = None
    continues: bool = False

    def place(self, record: int, offset: int, position: int, row_group: int | None = None) -> Place:
        return Place(reading=self, record=record, offset=offset, position=self.base + position, row_group=row_group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record begins. `position` is the number of bytes of all inputs, as stored, that are read by then."""

    reading: Reading
    record: int
    offset: int
    position: int
    row_group: int | None  # of Parquet files; of Arrow files the record batch

    @property
    def cursor(self) -> Cursor:
        return Cursor(file=self.reading.start.file, record=self.record, offset=self.offset)

    @property
    def number(self) -> int:
        """How people count: lines from 1, rows of a table from 0."""
        return self.record + (self.row_group is None)

    @property
    def key(self) -> int:
        """A number of the record in its file that needs no counting: its first byte, or its row."""
        return self.offset or self.record

    def fields(self) -> dict[str, str | int]:
        """For a quarantine file."""
        if self.row_group is None:
            return {"file": self.reading.file.shown, "line": self.number, "offset": self.offset}
        return {"file": self.reading.file.shown, "row": self.number, self._group.replace(" ", "_"): self.row_group}

    def __str__(self) -> str:
        if self.row_group is None:
            return f"{self.reading.file.shown}, line {self.number} (byte offset {self.offset})"
        return f"{self.reading.file.shown}, row {self.number} ({self._group} {self.row_group}, both counted from 0)"

    @property
    def _group(self) -> str:
        return "record batch" if self.reading.file.kind == "arrow" else "row group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text. `size` is its UTF-8 length. numbered: whether it has no name of its own but is called by its number.
    metadata: the columns that are kept, as a JSON object; None where none are. messages: of a conversation, whose
    contents are the text."""

    doc_id: str
    text: str
    source: str
    size: int
    place: Place
    numbered: bool = False
    metadata: str | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """A record that is no document: where it begins, why it is none, and its first bytes of `size`."""

    place: Place
    reason: str
    raw: bytes
    size: int

    def after(self, records: int) -> BadRecord:
        """The record in a file of which so many records come before the stretch."""
        return replace(self, place=replace(self.place, record=self.place.record + records))

    def sentence(self) -> str:
        return f"{self.place}: {self.reason}"

    def as_json(self) -> str:
        """One line for a quarantine file; bytes that are not UTF-8 are written as \\xNN."""
        raw = self.raw.decode("utf-8", "backslashreplace")
        fields = {**self.place.fields(), "reason": self.reason, "bytes": self.size, "raw": raw}
        return json.dumps(fields, ensure_ascii=False)


Record = Document | BadRecord


class BadTextError(Exception):
    """Why a record cannot be used."""


def bad_record(place: Place, reason: object, raw: bytes) -> BadRecord:
    """A record that is refused for `reason`. Only its beginning is kept."""
    return BadRecord(place=place, reason=str(reason), raw=raw[:RAW_BYTES], size=len(raw))


def too_long(place: Place, raw: bytes) -> BadRecord:
    """A record of which no more than `raw` was held."""
    limit = place.reading.longest
    return bad_record(place, f"longer than the {limit:,} bytes that a record may have; cut it, or allow more", raw)


def document_of(place: Place, fields: Mapping[str, Any]) -> Document:
    """The document that a record's fields describe. Raises BadTextError with the reason where they describe none."""
    columns = place.reading.columns
    for name in columns.needed:
        if name not in fields:
            raise BadTextError(f"no field {name}")
    numbered = columns.id not in fields
    doc_id = numbered_id(place.reading.file, place.number) if numbered else fields[columns.id]
    source = fields.get(columns.source, place.reading.file.source)
    messages = () if columns.chat is None else _conversation(fields[columns.chat], columns.chat)
    text = fields[columns.text] if columns.chat is None else text_of(messages)
    if not isinstance(text, str):
        raise BadTextError(f"the field {columns.text} is {kind_of(text)}, not a string")
    if not isinstance(doc_id, str | int) or isinstance(doc_id, bool):
        raise BadTextError(f"the field {columns.id} is {kind_of(doc_id)}, not a string or an integer")
    if not isinstance(source, str):
        raise BadTextError(f"the field {columns.source} is {kind_of(source)}, not a string")
    return named_document(
        place,
        doc_id=str(doc_id),
        text=text,
        source=source,
        numbered=numbered,
        metadata=_metadata(fields, columns.keep),
        messages=messages,
    )


def numbered_id(file: InputFile, number: int) -> str:
    """What a document is called that has no name: `number` as people count."""
    return f"{file.name}:{number}"


def named_document(
    place: Place,
    *,
    doc_id: str,
    text: str,
    source: str,
    numbered: bool = False,
    metadata: str | None = None,
    messages: tuple[Message, ...] = (),
) -> Document:
    """A document, once every string of it is known to have a UTF-8 form and its text is no longer than the reading's
    bound. Raises BadTextError."""
    columns, longest = place.reading.columns, place.reading.longest
    size = len(_encodable(text, columns.content))
    if size > longest:
        raise BadTextError(f"the field {columns.content} has {size:,} bytes, more than the {longest:,} of a record")
    _encodable(doc_id, columns.id)
    _encodable(source, columns.source)
    return Document(
        doc_id=doc_id,
        text=text,
        source=source,
        size=size,
        place=place,
        numbered=numbered,
        metadata=metadata,
        messages=messages,
    )


def _conversation(value: Any, column: str) -> tuple[Message, ...]:
    try:
        return messages_of(value)
    except ValueError as error:
        raise BadTextError(f"the field {column} is no conversation: {error}") from error


def _metadata(fields: Mapping[str, Any], keep: Sequence[str]) -> str | None:
    """The kept fields as a JSON object, those that are missing or null left out."""
    if not keep:
        return None
    kept = {name: fields[name] for name in keep if fields.get(name) is not None}
    for name, value in kept.items():
        if not isinstance(value, str | int | float):
            raise BadTextError(f"the field {name} is {kind_of(value)}: strings, numbers and booleans can be kept")
        if isinstance(value, float) and not math.isfinite(value):
            raise BadTextError(f"the field {name} is {value}, which JSON has no number for")
        if isinstance(value, str):
            _encodable(value, name)
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))


def kind_of(value: object) -> str:
    """What a value is, in the words of JSON where it has one."""
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        bytes: "binary data",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _encodable(text: str, field: str) -> bytes:
    """UTF-8 of a string. JSON escapes can spell half a surrogate pair, which is no character and has no UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadTextError(f"the field {field} holds a lone surrogate at character {error.start}") from error
