"""What readers of documents give: records, each a `Document` or a `BadRecord`, and the place where each begins.

A place is what a message names, and, as a `Cursor`, where a later run can begin to read. The rules about the fields of
a document (text, id, source) are here, so that they are the same in every kind of input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqmesh.tools.inputs import InputFile

RAW_BYTES = 1 << 16  # how much of a bad record is kept


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
class Reading:
    """A stretch of one file to read: from the first record that begins at `start` or later, to the end or to the last
    record that begins before `stop`.

    base: size of all inputs before the file. stop: counts as the cursor does, bytes in files of lines, rows in tables;
    files of text are never cut. data: the bytes of the stretch, whole lines, where they are read already. continues:
    whether records are counted from the beginning of the stretch, because nobody knows yet how many come before it.
    """

    file: InputFile
    start: Cursor
    base: int
    text_column: str
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
    row_group: int | None  # of Parquet files

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
        return {"file": self.reading.file.shown, "row": self.number, "row_group": self.row_group}

    def __str__(self) -> str:
        if self.row_group is None:
            return f"{self.reading.file.shown}, line {self.number} (byte offset {self.offset})"
        return f"{self.reading.file.shown}, row {self.number} (row group {self.row_group}, both counted from 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text. `size` is its UTF-8 length. numbered: whether it has no name of its own but is called by its number."""

    doc_id: str
    text: str
    source: str
    size: int
    place: Place
    numbered: bool = False


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


def document_of(place: Place, fields: Mapping[str, Any]) -> Document:
    """The document that a record's fields describe. Raises BadTextError with the reason where they describe none."""
    column = place.reading.text_column
    text, source = fields.get(column), fields.get("source", place.reading.file.source)
    doc_id = fields["id"] if "id" in fields else numbered_id(place.reading.file, place.number)
    if not isinstance(text, str):
        raise BadTextError(
            f"the field {column} is {kind_of(text)}, not a string" if column in fields else f"no field {column}"
        )
    if not isinstance(doc_id, str | int) or isinstance(doc_id, bool):
        raise BadTextError(f"the field id is {kind_of(doc_id)}, not a string or an integer")
    if not isinstance(source, str):
        raise BadTextError(f"the field source is {kind_of(source)}, not a string")
    return named_document(place, doc_id=str(doc_id), text=text, source=source, numbered="id" not in fields)


def numbered_id(file: InputFile, number: int) -> str:
    """What a document is called that has no name: `number` as people count."""
    return f"{file.name}:{number}"


def named_document(place: Place, *, doc_id: str, text: str, source: str, numbered: bool = False) -> Document:
    """A document, once every string of it is known to have a UTF-8 form. Raises BadTextError."""
    size = len(_encodable(text, place.reading.text_column))
    _encodable(doc_id, "id")
    _encodable(source, "source")
    return Document(doc_id=doc_id, text=text, source=source, size=size, place=place, numbered=numbered)


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
