"""Reads documents: JSONL, Parquet, Arrow and text files in, a stream of records out.

* JSONL: one object a line with the string `text` and, where present, `id` (string or integer) and `source` (string);
  `Columns` may give them other names, or a conversation in the place of a text. Lines of white space are skipped. A
  document without `id` is called `file name:line number`.
* Parquet and Arrow: one document a row, from columns of these names; see `seqmesh.tools.parquet` and
  `seqmesh.tools.reading.arrow`.
* any other file, found in a folder, is one document of text whose id is the path inside the folder.

Byte offsets count decompressed bytes. A UTF-8 byte-order mark at the start of a file is dropped. The source of a
document that names none is the file's name without its endings, or the folder's name.

A record that cannot be used is an item of the stream too (`BadRecord`): the caller decides whether it ends the job. A
line or text longer than `longest` bytes is one, of which no more than that is ever held.
Files that cannot be opened or decompressed always end it, with OSError or ValueError.
"""

from __future__ import annotations

import io
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from seqmesh.tools.inputs import BUFFER_BYTES, InputFile, is_compressed, opened
from seqmesh.tools.parquet import read_parquet
from seqmesh.tools.reading.arrow import read_arrow
from seqmesh.tools.records import (
    LONGEST_RECORD,
    PLAIN,
    RAW_BYTES,
    START,
    BadTextError,
    Columns,
    Cursor,
    Place,
    Reading,
    Record,
    bad_record,
    document_of,
    kind_of,
    named_document,
    too_long,
)

BOM = b"\xef\xbb\xbf"
READ_ERRORS = (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError)  # of files that are cut or damaged


def read_records(
    files: Sequence[InputFile], *, columns: Columns = PLAIN, start: Cursor = START, longest: int = LONGEST_RECORD
) -> Iterator[Record]:
    """All records of the files from `start` on, in order, one at a time."""
    if files[start.file :] and columns.content != "text" and all(file.kind == "text" for file in files):
        raise ValueError(f"the inputs are texts without fields: there is no {columns.content} to read")
    readers = {"jsonl": _read_jsonl, "parquet": read_parquet, "arrow": read_arrow, "text": _read_text}
    base = sum(file.size for file in files[: start.file])
    for number, file in enumerate(files[start.file :], start.file):
        begin = start if number == start.file else Cursor(file=number, record=0, offset=0)
        reading = Reading(file=file, start=begin, base=base, columns=columns, longest=longest)
        yield from readers[file.kind](reading)
        base += file.size


def _read_jsonl(reading: Reading) -> Iterator[Record]:
    offset = reading.start.offset
    with opened(reading.file) as (stream, stored):
        for number, line in enumerate(_lines(stream, reading), reading.start.record):
            content = line.first.removeprefix(BOM) if number == 0 else line.first
            if line.size > len(line.first):
                yield too_long(reading.place(number, offset, stored.tell()), content, line.size)
            elif content.strip():
                yield _record(reading.place(number, offset, stored.tell()), content)
            offset += line.size


class _Line(NamedTuple):
    """A line, or the beginning of one that is too long to hold."""

    first: bytes
    size: int


def _lines(stream: io.BufferedReader, reading: Reading) -> Iterator[_Line]:
    """The lines of a stream from the start of the reading on. A file whose compressed data are cut or damaged raises
    ValueError naming the line."""
    number = reading.start.record
    try:
        _skip(stream, reading)
        for line in iter(partial(stream.readline, reading.longest + 1), b""):
            number += 1
            whole = len(line) <= reading.longest or line.endswith(b"\n")
            yield _Line(line, len(line)) if whole else _rest_of(stream, line)
    except READ_ERRORS as error:
        raise ValueError(f"cannot read {reading.file.shown} after line {number}: {error}") from error


def _rest_of(stream: io.BufferedReader, line: bytes) -> _Line:
    """Go to the end of a line that is too long, of which `line` was read."""
    first, size = line[:RAW_BYTES], len(line)
    while not line.endswith(b"\n") and (line := stream.readline(BUFFER_BYTES)):
        size += len(line)
    return _Line(first, size)


def _skip(stream: io.BufferedReader, reading: Reading) -> None:
    """Go to the offset. Compressed data must be read to get there, but nothing in them is parsed or tokenised."""
    left = reading.start.offset
    if left and not is_compressed(reading.file):
        stream.seek(left)
        return
    while left:
        chunk = stream.read(min(left, BUFFER_BYTES))
        if not chunk:
            raise EOFError(f"the file ends {left} bytes before the place where the last run stopped")
        left -= len(chunk)


def _record(place: Place, line: bytes) -> Record:
    try:
        return document_of(place, _json_object(line))
    except BadTextError as error:
        return bad_record(place, error, line)


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadTextError(f"invalid UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise BadTextError(_json_reason(error, cut=not line.endswith(b"\n"))) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise BadTextError(f"JSON beyond the parser's limits: {error}") from error
    if not isinstance(value, dict):
        raise BadTextError(f"the line is {kind_of(value)}, not an object")
    return cast("dict[str, Any]", value)


def _json_reason(error: json.JSONDecodeError, *, cut: bool) -> str:
    if error.msg == "Extra data":
        return f"more than one JSON value on the line (the second begins at character {error.pos})"
    reason = f"not JSON: {error.msg} (character {error.pos})"
    return f"{reason}; the file's last line seems cut off" if cut else reason


def _read_text(reading: Reading) -> Iterator[Record]:
    place = reading.place(0, 0, reading.file.size)
    data, size = _whole(reading)
    data = data.removeprefix(BOM)
    if size > reading.longest:
        yield too_long(place, data, size)
        return
    try:
        yield named_document(place, doc_id=reading.file.name, text=data.decode(), source=reading.file.source)
    except UnicodeDecodeError as error:
        yield bad_record(place, f"invalid UTF-8 at byte {error.start}: not a text file", data)
    except BadTextError as error:
        yield bad_record(place, error, data)


def _whole(reading: Reading) -> tuple[bytes, int]:
    """A file's bytes, as many as a record may have, and how many there are."""
    try:
        with opened(reading.file) as (stream, _):
            data = stream.read(reading.longest + 1)
            size = len(data)
            while size > reading.longest and (more := stream.read(BUFFER_BYTES)):
                size += len(more)
    except READ_ERRORS as error:
        raise ValueError(f"cannot read {reading.file.shown}: {error}") from error
    return data, size
