"""Which files the inputs of `prepare` name, what each of them is, and how to open one.

Inputs go through fsspec, so a path may be local or a URL (`s3://...`, `memory://...`) whose driver is installed.

* a file is JSONL, or Parquet where it ends in .parquet.
* a folder is read recursively in sorted order: *.jsonl and *.ndjson as JSONL, *.parquet as Parquet, every other file
  as one document of text. Names that begin with a dot are left out.

Files of lines or text that end in .gz, .bz2, .xz or .zst are decompressed on the way.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, Literal

import fsspec
import pyarrow as pa
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
NOT_READ = {".zip", ".lz4", ".sz", ".snappy", ".7z", ".tar", ".tgz"}  # never text, so refused by name
BUFFER_BYTES = 1 << 20

Kind = Literal["jsonl", "parquet", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file to read. `shown` is how messages call it, `name` how document ids do (never an absolute path)."""

    filesystem: Any
    path: str
    shown: str
    name: str
    source: str
    kind: Kind
    size: int  # bytes as stored; 0 where unknown
    version: str  # differs once the file is written again; empty where the storage does not tell


def find_files(inputs: Sequence[str]) -> tuple[InputFile, ...]:
    """The files behind the inputs, in reading order. Raises FileNotFoundError or ValueError naming the input."""
    return tuple(file for given in inputs for file in _files_of(given))


@contextmanager
def opened(file: InputFile) -> Iterator[tuple[io.BufferedReader, IO[bytes]]]:
    """The decompressed stream and, for progress, the stored one below it."""
    with file.filesystem.open(file.path, "rb") as stored:
        if _suffix(file) == ".zst":  # fsspec needs another package for it, pyarrow has it built in
            plain: Any = pa.CompressedInputStream(stored, "zstd")
        else:
            plain = compr[infer_compression(file.path)](stored, mode="rb")
        yield io.BufferedReader(plain, BUFFER_BYTES), stored


def is_compressed(file: InputFile) -> bool:
    """Whether `opened` decompresses it: then its stream can only be read from the beginning."""
    return _suffix(file) in COMPRESSIONS


def _suffix(file: InputFile) -> str:
    return PurePosixPath(file.path).suffix.lower()


def _files_of(given: str) -> Iterator[InputFile]:
    try:
        filesystem, path = fsspec.core.url_to_fs(given)
    except (ImportError, ValueError) as error:  # no driver, no such protocol
        raise ValueError(f"cannot open {given}: {error}") from error
    if filesystem.isdir(path):
        yield from _files_in(filesystem, path.rstrip("/"), given)
    elif filesystem.exists(path):
        name = PurePosixPath(path).name
        kind: Kind = "parquet" if _kind(name) == "parquet" else "jsonl"
        yield _input_file(filesystem, path, shown=given, name=name, source=name.split(".")[0] or name, kind=kind)
    else:
        raise FileNotFoundError(f"no such input: {given}")


def _files_in(filesystem: Any, folder: str, given: str) -> Iterator[InputFile]:
    source = PurePosixPath(folder).name or "root"
    names = sorted(path[len(folder) :].lstrip("/") for path in filesystem.find(folder))
    visible = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not visible:
        raise ValueError(f"the folder {given} holds no files to read")
    for name in visible:
        shown = f"{given.rstrip('/')}/{name}"
        yield _input_file(filesystem, f"{folder}/{name}", shown=shown, name=name, source=source, kind=_kind(name))


def _input_file(filesystem: Any, path: str, *, shown: str, name: str, source: str, kind: Kind) -> InputFile:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in NOT_READ:
        raise ValueError(
            f"{shown}: files that end in {suffix} are not read; give JSONL or text, plain or as .gz or .zst, or Parquet"
        )
    if suffix in COMPRESSIONS and _bare(name).suffix == PARQUET_SUFFIX:
        raise ValueError(f"{shown}: Parquet files are not read through {suffix}; they are compressed inside: unpack it")
    info = filesystem.info(path)
    size, version = int(info.get("size") or 0), _version(filesystem, path, info)
    return InputFile(
        filesystem=filesystem,
        path=path,
        shown=shown,
        name=name,
        source=source,
        kind=kind,
        size=size,
        version=version,
    )


def _version(filesystem: Any, path: str, info: Mapping[str, Any]) -> str:
    """Local files have a time of change in nanoseconds; object stores hand out a tag with the content."""
    if isinstance(filesystem, LocalFileSystem):
        return str(os.stat(path).st_mtime_ns)
    return str(info.get("ETag") or info.get("etag") or "")


def _bare(name: str) -> PurePosixPath:
    """The lower-case name without the ending of a compression."""
    path = PurePosixPath(name.lower())
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def _kind(name: str) -> Kind:
    suffix = _bare(name).suffix
    if suffix == PARQUET_SUFFIX:
        return "parquet"
    return "jsonl" if suffix in JSONL_SUFFIXES else "text"
