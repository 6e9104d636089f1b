"""Reads documents: JSONL files and folders of text files in, a stream of records out.

Inputs are opened through fsspec, so a path may be local or a URL (`s3://...`, `memory://...`) whose driver is
installed. What an input is:

* a file is JSONL: one object a line with the string `text` and, where present, `id` (string or integer) and `source`
  (string). Lines of white space are skipped. A document without `id` is called `file name:line number`.
* a folder is read recursively in sorted order: files named *.jsonl or *.ndjson as JSONL, every other file as one
  document of text whose id is the path inside the folder. Names that begin with a dot are left out.

Files that end in .gz, .bz2, .xz or .zst are decompressed on the way; byte offsets count decompressed bytes. A UTF-8
byte-order mark at the start of a file is dropped. The source of a document that names none is the file's name without
its endings, or the folder's name.

A record that cannot be used is an item of the stream too (`BadRecord`): the caller decides whether it ends the job.
Files that cannot be opened or decompressed always end it, with OSError or ValueError.
"""

from __future__ import annotations

import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, Literal, cast

import fsspec
import pyarrow as pa
from fsspec.compression import compr
from fsspec.utils import infer_compression

JSONL_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
NOT_READ = {".zip", ".lz4", ".sz", ".snappy", ".7z", ".tar", ".tgz", ".parquet"}  # never text, so refused by name
BUFFER_BYTES = 1 << 20
RAW_BYTES = 1 << 16  # how much of a bad record is kept
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file to read. `shown` is how messages call it, `name` how document ids do (never an absolute path)."""

    filesystem: Any
    path: str
    shown: str
    name: str
    source: str
    kind: Literal["jsonl", "text"]
    size: int  # bytes as stored; 0 where unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text. `size` is its UTF-8 length; `position` the bytes of all inputs (as stored) read so far."""

    doc_id: str
    text: str
    source: str
    size: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """A record that is no document: where (line from 1, byte offset of its start), why, and its first bytes."""

    file: str
    line: int
    offset: int
    reason: str
    raw: bytes
    size: int
    position: int

    def sentence(self) -> str:
        return f"{self.file}, line {self.line} (byte offset {self.offset}): {self.reason}"

    def as_json(self) -> str:
        """One line for a quarantine file; bytes that are not UTF-8 are written as \\xNN."""
        raw = self.raw.decode("utf-8", "backslashreplace")
        fields = {"file": self.file, "line": self.line, "offset": self.offset, "reason": self.reason}
        return json.dumps({**fields, "bytes": self.size, "raw": raw}, ensure_ascii=False)


Record = Document | BadRecord


class _BadTextError(Exception):
    """Why a record cannot be used."""


def find_files(inputs: Sequence[str]) -> tuple[InputFile, ...]:
    """The files behind the inputs, in reading order. Raises FileNotFoundError or ValueError naming the input."""
    return tuple(file for given in inputs for file in _files_of(given))


def read_records(files: Iterable[InputFile]) -> Iterator[Record]:
    """All records of the files, in order, one at a time."""
    base = 0
    for file in files:
        read = _read_jsonl if file.kind == "jsonl" else _read_text
        yield from read(file, base)
        base += file.size


def _files_of(given: str) -> Iterator[InputFile]:
    try:
        filesystem, path = fsspec.core.url_to_fs(given)
    except (ImportError, ValueError) as error:  # no driver, no such protocol
        raise ValueError(f"cannot open {given}: {error}") from error
    if filesystem.isdir(path):
        yield from _files_in(filesystem, path.rstrip("/"), given)
    elif filesystem.exists(path):
        name = PurePosixPath(path).name
        yield _input_file(filesystem, path, shown=given, name=name, source=name.split(".")[0] or name, kind="jsonl")
    else:
        raise FileNotFoundError(f"no such input: {given}")


def _files_in(filesystem: Any, folder: str, given: str) -> Iterator[InputFile]:
    source = PurePosixPath(folder).name or "root"
    names = sorted(path[len(folder) :].lstrip("/") for path in filesystem.find(folder))
    visible = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not visible:
        raise ValueError(f"the folder {given} holds no files to read")
    for name in visible:
        kind: Literal["jsonl", "text"] = "jsonl" if _is_jsonl(name) else "text"
        shown = f"{given.rstrip('/')}/{name}"
        yield _input_file(filesystem, f"{folder}/{name}", shown=shown, name=name, source=source, kind=kind)


def _input_file(
    filesystem: Any, path: str, *, shown: str, name: str, source: str, kind: Literal["jsonl", "text"]
) -> InputFile:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in NOT_READ:
        raise ValueError(
            f"{shown}: files that end in {suffix} are not read; give JSONL or text, plain or as .gz or .zst"
        )
    size = int(filesystem.size(path) or 0)
    return InputFile(filesystem=filesystem, path=path, shown=shown, name=name, source=source, kind=kind, size=size)


def _is_jsonl(name: str) -> bool:
    path = PurePosixPath(name.lower())
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix in JSONL_SUFFIXES


@contextmanager
def _opened(file: InputFile) -> Iterator[tuple[io.BufferedReader, IO[bytes]]]:
    """The decompressed stream and, for progress, the stored one below it."""
    with file.filesystem.open(file.path, "rb") as stored:
        if file.path.endswith(".zst"):  # fsspec needs another package for it, pyarrow has it built in
            plain: Any = pa.CompressedInputStream(stored, "zstd")
        else:
            plain = compr[infer_compression(file.path)](stored, mode="rb")
        yield io.BufferedReader(plain, BUFFER_BYTES), stored


def _read_jsonl(file: InputFile, base: int) -> Iterator[Record]:
    offset = 0
    with _opened(file) as (stream, stored):
        for number, line in enumerate(_lines(stream, file), start=1):
            content = line.removeprefix(BOM) if number == 1 else line
            if content.strip():
                where = _Place(file=file, line=number, offset=offset, position=base + stored.tell())
                yield _record(where, content)
            offset += len(line)


def _lines(stream: io.BufferedReader, file: InputFile) -> Iterator[bytes]:
    """The lines of a stream. A file whose compressed data are cut or damaged raises ValueError naming the line."""
    number = 0
    try:
        for line in stream:
            number += 1
            yield line
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"cannot read {file.shown} after line {number}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a record begins."""

    file: InputFile
    line: int
    offset: int
    position: int

    def document(self, *, doc_id: str, text: str, source: str) -> Document:
        size = len(_encodable(text, "text"))
        _encodable(doc_id, "id")
        _encodable(source, "source")
        return Document(doc_id=doc_id, text=text, source=source, size=size, position=self.position)

    def bad(self, reason: str, raw: bytes) -> BadRecord:
        return BadRecord(
            file=self.file.shown,
            line=self.line,
            offset=self.offset,
            reason=reason,
            raw=raw[:RAW_BYTES],
            size=len(raw),
            position=self.position,
        )


def _record(where: _Place, line: bytes) -> Record:
    try:
        fields = _json_object(line)
        text, source = fields.get("text"), fields.get("source", where.file.source)
        doc_id = fields.get("id", f"{where.file.name}:{where.line}")
        if not isinstance(text, str):
            raise _BadTextError(
                f"the field text is {_kind(text)}, not a string" if "text" in fields else "no field text"
            )
        if not isinstance(doc_id, str | int) or isinstance(doc_id, bool):
            raise _BadTextError(f"the field id is {_kind(doc_id)}, not a string or an integer")
        if not isinstance(source, str):
            raise _BadTextError(f"the field source is {_kind(source)}, not a string")
        return where.document(doc_id=str(doc_id), text=text, source=source)
    except _BadTextError as error:
        return where.bad(str(error), line)


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _BadTextError(f"invalid UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise _BadTextError(_json_reason(error, cut=not line.endswith(b"\n"))) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise _BadTextError(f"JSON beyond the parser's limits: {error}") from error
    if not isinstance(value, dict):
        raise _BadTextError(f"the line is {_kind(value)}, not an object")
    return cast("dict[str, Any]", value)


def _json_reason(error: json.JSONDecodeError, *, cut: bool) -> str:
    if error.msg == "Extra data":
        return f"more than one JSON value on the line (the second begins at character {error.pos})"
    reason = f"not JSON: {error.msg} (character {error.pos})"
    return f"{reason}; the file's last line seems cut off" if cut else reason


def _kind(value: object) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "a string")


def _encodable(text: str, field: str) -> bytes:
    """UTF-8 of a string. JSON escapes can spell half a surrogate pair, which is no character and has no UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _BadTextError(f"the field {field} holds a lone surrogate at character {error.start}") from error


def _read_text(file: InputFile, base: int) -> Iterator[Record]:
    where = _Place(file=file, line=1, offset=0, position=base + file.size)
    with _opened(file) as (stream, _):
        data = b"".join(_lines(stream, file)).removeprefix(BOM)
    try:
        yield where.document(doc_id=file.name, text=data.decode(), source=file.source)
    except UnicodeDecodeError as error:
        yield where.bad(f"invalid UTF-8 at byte {error.start}: not a text file", data)
    except _BadTextError as error:
        yield where.bad(str(error), data)
