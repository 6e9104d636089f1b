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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from seqmesh.tools.inputs import BUFFER_BYTES, InputFile, Kind, is_compressed, opened
from seqmesh.tools.parquet import read_parquet
from seqmesh.tools.reading.arrow import read_arrow
from seqmesh.tools.records import (
    LONGEST_RECORD,
    PLAIN,
    START,
    BadTextError,
    Columns,
    Cursor,
    Document,
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
    for reading in readings(files, columns=columns, start=start, longest=longest):
        yield from read(reading)


def readings(
    files: Sequence[InputFile], *, columns: Columns = PLAIN, start: Cursor = START, longest: int = LONGEST_RECORD
) -> Iterator[Reading]:
    """The files from `start` on, each in one piece."""
    base = sum(file.size for file in files[: start.file])
    for number, file in enumerate(files[start.file :], start.file):
        begin = start if number == start.file else Cursor(file=number, record=0, offset=0)
        yield Reading(file=file, start=begin, base=base, columns=columns, longest=longest)
        base += file.size


def read(reading: Reading) -> Iterator[Record]:
    """The records of one stretch of a file."""
    readers: dict[Kind, Callable[[Reading], Iterator[Record]]] = {
        "jsonl": _read_jsonl,
        "parquet": read_parquet,
        "arrow": read_arrow,
        "text": _read_text,
    }
    return readers[reading.file.kind](reading)


def stretch(reading: Reading) -> tuple[int, bytes]:
    """Of a stretch that ends before the file: the offset of its first line, and the bytes of all its lines.

    A line belongs to the stretch in which it begins, so the last may reach beyond `stop`; where none begins there are
    no bytes. Memory: the stretch, and its last line, of which no more than `finished` keeps.
    """
    if reading.data is not None:
        return reading.start.offset, reading.data
    with opened(reading.file) as (stream, _):
        try:
            first, stop = _first_line(stream, reading)
            return first, finished(stream, stream.read(max(stop - first, 0)), reading)[0]
        except OSError as error:
            raise _unreadable(reading, error) from error


def lines_of(reading: Reading) -> Iterator[tuple[int, bytes]]:
    """The lines of such a stretch one by one, and the offset of each. No more is held of any than `finished` keeps."""
    with opened(reading.file) if reading.data is None else _held(reading.data) as (stream, _):
        try:
            at, stop = _first_line(stream, reading)
            while at < stop and (line := stream.readline(reading.longest + 1)):
                kept, size = finished(stream, line, reading) if len(line) > reading.longest else (line, len(line))
                yield at, kept
                at += size
        except OSError as error:
            raise _unreadable(reading, error) from error


def _unreadable(reading: Reading, error: OSError) -> ValueError:
    return ValueError(f"cannot read {reading.file.shown} after byte {reading.start.offset}: {error}")


@contextmanager
def _held(data: bytes) -> Iterator[tuple[io.BufferedReader, None]]:
    """Like `opened`, of bytes that are read already."""
    yield io.BufferedReader(io.BytesIO(data), BUFFER_BYTES), None


def _first_line(stream: io.BufferedReader, reading: Reading) -> tuple[int, int]:
    """Go to the first line that begins in the stretch: its offset, and where the stretch ends."""
    at = reading.start.offset
    if reading.data is not None:
        return at, at + len(reading.data)
    assert reading.stop is not None
    if at:  # the line before it may end here, or nowhere in the stretch
        stream.seek(at - 1)
        at += len(stream.readline(reading.stop - at + 1)) - 1
    return at, reading.stop


def skip_to(stream: io.BufferedReader, reading: Reading) -> None:
    """Go to the start of a reading. Compressed data must be read to get there, but nothing in them is parsed."""
    left = reading.start.offset
    if left and not is_compressed(reading.file):
        with suppress(OSError, ValueError):  # of a web server that gives whole files only
            stream.seek(left)
            return
    while left:
        chunk = stream.read(min(left, BUFFER_BYTES))
        if not chunk:
            raise EOFError(f"the file ends {left} bytes before the place where the last run stopped")
        left -= len(chunk)


def finished(stream: io.BufferedReader, data: bytes, reading: Reading) -> tuple[bytes, int]:
    """`data` to the end of its last line, and the number of bytes that these are.

    The stream stands at that end then. Of a line that is too long no more is kept than tells so.
    """
    if data and not data.endswith(b"\n"):
        begun = len(data) - data.rfind(b"\n") - 1
        data += stream.readline(max(reading.longest + 1 - begun, 0))
    last, size = data, len(data)
    while last and not last.endswith(b"\n"):
        last = stream.readline(BUFFER_BYTES)
        size += len(last)
    return data, size


def line_record(place: Place, line: bytes) -> Record:
    """What a line of JSONL holds."""
    if len(line) > place.reading.longest:
        return too_long(place, line)
    try:
        return document_of(place, _json_object(line))
    except BadTextError as error:
        return bad_record(place, error, line)


def _read_jsonl(reading: Reading) -> Iterator[Record]:
    with _lines(reading) as (offset, lines, tell):
        for number, (line, size) in enumerate(lines, reading.start.record):
            content = line if offset else line.removeprefix(BOM)
            if content.strip():
                yield line_record(reading.place(number, offset, tell()), content)
            offset += size


@contextmanager
def _lines(reading: Reading) -> Iterator[tuple[int, Iterator[tuple[bytes, int]], Callable[[], int]]]:
    """The offset of the first line; the lines, each with its size; how many bytes of the file, as stored, are read."""
    if reading.data is None and reading.stop is None:
        with opened(reading.file) as (stream, stored):
            yield reading.start.offset, _streamed(stream, reading), stored.tell
    else:
        offset, data = stretch(reading)
        yield offset, ((line, len(line)) for line in io.BytesIO(data)), lambda: offset + len(data)


def _streamed(stream: io.BufferedReader, reading: Reading) -> Iterator[tuple[bytes, int]]:
    """The lines of a stream from the start of the reading on, and their sizes. A file whose compressed data are cut or
    damaged raises ValueError naming the line."""
    number = reading.start.record
    try:
        skip_to(stream, reading)
        for line in iter(partial(stream.readline, reading.longest + 1), b""):
            number += 1
            yield finished(stream, line, reading) if len(line) > reading.longest else (line, len(line))
    except READ_ERRORS as error:
        raise ValueError(f"cannot read {reading.file.shown} after line {number}: {error}") from error


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
    try:
        with opened(reading.file) as (stream, _):
            data = stream.read(reading.longest + 1)
    except READ_ERRORS as error:
        raise ValueError(f"cannot read {reading.file.shown}: {error}") from error
    try:
        yield too_long(place, data) if len(data) > reading.longest else _text(place, data.removeprefix(BOM))
    except UnicodeDecodeError as error:
        yield bad_record(place, f"invalid UTF-8 at byte {error.start}: not a text file", data)
    except BadTextError as error:
        yield bad_record(place, error, data)


def _text(place: Place, data: bytes) -> Document:
    if place.reading.columns.chat is not None:
        raise BadTextError(f"a file of text has no field {place.reading.columns.chat}")
    file = place.reading.file
    return named_document(place, doc_id=file.name, text=data.decode(), source=file.source)
