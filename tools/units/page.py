"""The records of a unit as columns, which are cheaper than objects by the million.

Lines of JSONL go by a fast parser; a line that it refuses, for whatever reason, is judged by the reader that names
reasons, so that what is accepted and what is said of the rest does not depend on the parser.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import orjson

from seqmesh.tools.documents import BOM, line_record, lines_of, read
from seqmesh.tools.records import BadRecord, Document, Reading, Record, numbered_id
from seqmesh.tools.units.cut import Unit


class Page:
    """What a unit holds: one entry a record, in order.

    texts: None where a record is bad; `bad` holds those, in order, and their source is that of their file. doc_ids:
    None where a document is called by a number that is not known here. files, records, offsets, keys: as in `Place`.
    records_in_last: lines before the end of what is read of the last file. metadata: of columns that are kept. chats:
    of conversations, by their numbers here, the documents.
    """

    def __init__(self) -> None:
        self.texts: list[str | None] = []
        self.doc_ids: list[str | None] = []
        self.sources: list[str] = []
        self.files = array("q")
        self.records = array("q")
        self.offsets = array("q")
        self.keys = array("q")
        self.bad: list[BadRecord] = []
        self.metadata: list[str | None] = []
        self.chats: dict[int, Document] = {}
        self.records_in_last = 0


def page_of(unit: Unit) -> Page:
    """Read a unit. Raises ValueError or OSError for a file that cannot be read."""
    page = Page()
    if unit.records is not None:
        _add(page, unit.records)
        return page
    for reading in unit.readings:
        if reading.file.kind == "jsonl":
            _add_lines(page, reading)
        else:
            _add(page, read(reading))
    return page


def _add(page: Page, records: Iterable[Record]) -> None:
    for record in records:
        place = record.place
        page.files.append(place.reading.start.file)
        page.records.append(place.record)
        page.offsets.append(place.offset)
        page.keys.append(place.key)
        if isinstance(record, BadRecord):
            page.bad.append(record)
            page.metadata.append(None)
            page.texts.append(None)
            page.doc_ids.append(None)
            page.sources.append(place.reading.file.source)
        else:
            if place.reading.columns.chat is not None:
                page.chats[len(page.texts)] = record
            page.metadata.append(record.metadata)
            page.texts.append(record.text)
            page.doc_ids.append(None if record.numbered and place.reading.continues else record.doc_id)
            page.sources.append(record.source)


def _add_lines(page: Page, reading: Reading) -> None:
    """The lines of a stretch: one pass without an object for each."""
    number = reading.start.record - 1
    for number, (at, line) in enumerate(lines_of(reading), reading.start.record):
        content = line if at else line.removeprefix(BOM)
        fields = _fields(content, reading)
        if fields is None:
            if content.strip():
                _add(page, [line_record(reading.place(number, at, at + len(line)), content)])
            continue
        text, doc_id, source = fields
        if doc_id is None and not reading.continues:
            doc_id = numbered_id(reading.file, number + 1)
        page.texts.append(text)
        page.doc_ids.append(doc_id)
        page.sources.append(source)
        page.metadata.append(None)
        page.files.append(reading.start.file)
        page.records.append(number)
        page.offsets.append(at)
        page.keys.append(at)
    page.records_in_last = number + 1


def _fields(line: bytes, reading: Reading) -> tuple[str, str | None, str] | None:
    """Text, name (None where there is none) and source of a line, None where they are not plainly there."""
    columns = reading.columns
    if not columns.plain or len(line) > reading.longest:
        return None
    try:
        fields = orjson.loads(line)
        text, source = fields[columns.text], fields.get("source", reading.file.source)
        doc_id = fields.get("id")
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if type(doc_id) is int:
        doc_id = str(doc_id)
    named = type(doc_id) is str or "id" not in fields
    return (text, doc_id, source) if type(text) is str and type(source) is str and named else None
