"""Which files the inputs of `prepare` name, what each of them is, and how to open one.

Inputs go through fsspec, so a path may be local or a URL (`s3://...`, `https://...`) whose driver is installed.

* a file is JSONL; Parquet where it ends in .parquet, Arrow where it ends in .arrow, .feather or .ipc.
* a folder is read recursively in sorted order: *.jsonl and *.ndjson as JSONL, Parquet and Arrow by their endings, every
  other file as one document of text. Names that begin with a dot are left out. A folder that is a saved dataset holds
  the Arrow files that its state.json lists, see `seqmesh.tools.reading.dataset`.
* a pattern (`data/*.jsonl.gz`, `s3://b/**/*.parquet`) stands for the files that match it, in sorted order, each read
  like a file of that name; never for folders, nor for names that begin with a dot.
* `-` is standard input, which `seqmesh.tools.reading.stdin` makes a file of first.

Files of lines or text that end in .gz, .bz2, .xz or .zst are decompressed on the way.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from seqmesh.tools.reading.dataset import dataset_files, without_descriptions

JSONL_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES: dict[str, Kind] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
NOT_READ = {".zip", ".lz4", ".sz", ".snappy", ".7z", ".tar", ".tgz"}  # never text, so refused by name
BUFFER_BYTES = 1 << 20
STDIN = "-"

Kind = Literal["jsonl", "parquet", "arrow", "text"]


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

    @property
    def has_rows(self) -> bool:
        """Whether records are rows of a table, counted from 0, rather than lines or a text."""
        return self.kind in ("parquet", "arrow")


def find_files(inputs: Sequence[str], *, stdin: InputFile | None = None) -> tuple[InputFile, ...]:
    """The files behind the inputs, in reading order. `stdin`: what stands for `-`.

    Raises FileNotFoundError or ValueError naming the input.
    """
    if inputs.count(STDIN) > 1:
        raise ValueError("- is given more than once: standard input can be read once")
    if STDIN in inputs and stdin is None:
        raise ValueError("- is standard input, which is not read here: give files, folders, patterns or URLs")
    return tuple(file for given in inputs for file in ([stdin] if given == STDIN and stdin else _found(given)))


@contextmanager
def stored(file: InputFile) -> Iterator[Any]:
    """The file as it lies in its storage."""
    with _plain_errors(file.shown), file.filesystem.open(file.path, "rb") as stream:
        yield stream


@contextmanager
def _plain_errors(shown: str) -> Iterator[None]:
    """Storages' libraries raise classes of their own where a link breaks or a key is missing: here they are OSError."""
    try:
        yield
    except (OSError, ValueError, EOFError, ImportError, pa.ArrowException):
        raise
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        raise OSError(f"{shown}: {error}") from error


@contextmanager
def opened(file: InputFile) -> Iterator[tuple[io.BufferedReader, IO[bytes]]]:
    """The decompressed stream and, for progress, the stored one below it."""
    with stored(file) as raw:
        if _suffix(file.name) == ".zst":  # fsspec needs another package for it, pyarrow has it built in
            plain: Any = pa.CompressedInputStream(raw, "zstd")
        else:
            plain = compr[infer_compression(file.name)](raw, mode="rb")
        yield io.BufferedReader(plain, BUFFER_BYTES), raw


def is_compressed(file: InputFile) -> bool:
    """Whether `opened` decompresses it: then its stream can only be read from the beginning."""
    return _suffix(file.name) in COMPRESSIONS


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def without_output(files: Sequence[InputFile], out: Path, inputs: Sequence[str]) -> tuple[InputFile, ...]:
    """The files without those that an input holds because the output is inside it: an earlier run wrote them."""
    inside = f"{out.resolve()}{os.sep}"
    return tuple(
        file
        for file in files
        if file.shown in inputs
        or not isinstance(file.filesystem, LocalFileSystem)
        or not os.path.realpath(file.path).startswith(inside)
    )


def _found(given: str) -> list[InputFile]:
    with _plain_errors(given):
        return list(_files_of(given))


def _files_of(given: str) -> Iterator[InputFile]:
    try:
        filesystem, path = fsspec.core.url_to_fs(given)
    except (ImportError, ValueError) as error:  # no driver, no such protocol
        raise ValueError(f"cannot open {given}: {error}") from error
    if _is_folder(filesystem, path):
        yield from _files_in(filesystem, path.rstrip("/"), given.rstrip("/"))
    elif filesystem.exists(path):
        yield _named(filesystem, path, shown=given, name=_file_name(filesystem, path))
    elif fsspec.core.has_magic(path):
        yield from _matching(filesystem, path, given)
    else:
        raise FileNotFoundError(f"no such input: {given}")


def _is_folder(filesystem: Any, path: str) -> bool:
    """On the web every address is a file, and asking for what is below it would fetch it."""
    return path.endswith("/") if _is_web(filesystem) else bool(filesystem.isdir(path))


def _is_web(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return "http" in ([protocol] if isinstance(protocol, str) else protocol)


def _file_name(filesystem: Any, path: str) -> str:
    """The last part of a path, without the query of a web address."""
    return PurePosixPath(urlsplit(path).path if _is_web(filesystem) else path).name


def _named(filesystem: Any, path: str, *, shown: str, name: str) -> InputFile:
    """A file that is named, rather than found in a folder: JSONL, unless it is a table by its ending."""
    last = PurePosixPath(name).name
    kind = _kind(last)
    return _input_file(
        filesystem,
        path,
        shown=shown,
        name=name,
        source=last.split(".")[0] or last,
        kind="jsonl" if kind == "text" else kind,
    )


def _matching(filesystem: Any, pattern: str, given: str) -> Iterator[InputFile]:
    """The files that match. They are called by what follows the last folder that the pattern names outright."""
    root, shown_root = _fixed(pattern), _fixed(given)
    found = filesystem.glob(pattern, detail=True)
    names = sorted(path.removeprefix(root) for path, info in found.items() if info.get("type") != "directory")
    visible = [name for name in names if not _is_hidden(name)]
    if not visible:
        raise FileNotFoundError(f"no file matches {given}")
    for name in visible:
        yield _named(filesystem, root + name, shown=shown_root + name, name=name)


def _fixed(pattern: str) -> str:
    """What precedes the first part of a pattern that has a wildcard in it."""
    first = min(at for character in "*?[" if (at := pattern.find(character)) >= 0)
    return pattern[: pattern.rfind("/", 0, first) + 1]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _files_in(filesystem: Any, folder: str, given: str) -> Iterator[InputFile]:
    source = PurePosixPath(urlsplit(folder).path if _is_web(filesystem) else folder).name or "root"
    names = dataset_files(filesystem, folder, given)
    if names is None:
        found = sorted(path[len(folder) :].lstrip("/") for path in filesystem.find(folder))
        names = without_descriptions([name for name in found if not _is_hidden(name)])
    if not names:
        raise ValueError(f"the folder {given} holds no files to read")
    for name in names:
        path, shown = f"{folder}/{name}", f"{given}/{name}"
        if isinstance(filesystem, LocalFileSystem) and os.path.isdir(path):
            raise ValueError(f"{shown} is a link to a folder, which is not followed: give it as an input of its own")
        yield _input_file(filesystem, path, shown=shown, name=name, source=source, kind=_kind(name))


def _input_file(filesystem: Any, path: str, *, shown: str, name: str, source: str, kind: Kind) -> InputFile:
    suffix, inner = _suffix(name), _bare(name).suffix
    if any("\ud800" <= character <= "\udfff" for character in shown):
        raise ValueError(f"{shown!a}: this name is not UTF-8, which documents are to be called by: rename it")
    if suffix in NOT_READ:
        raise ValueError(
            f"{shown}: files that end in {suffix} are not read; give JSONL or text, plain or as .gz or .zst, or Parquet"
        )
    if suffix in COMPRESSIONS and inner in TABLE_SUFFIXES:
        what = TABLE_SUFFIXES[inner].capitalize()
        raise ValueError(f"{shown}: {what} files are not read through {suffix}; they are compressed inside: unpack it")
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
    """Local files have a time of change in nanoseconds; object stores hand out a tag with the content, web servers at
    least a time."""
    if isinstance(filesystem, LocalFileSystem):
        return str(os.stat(path).st_mtime_ns)
    return str(info.get("ETag") or info.get("etag") or info.get("Last-Modified") or "")


def _bare(name: str) -> PurePosixPath:
    """The lower-case name without the ending of a compression."""
    path = PurePosixPath(name.lower())
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def _kind(name: str) -> Kind:
    suffix = _bare(name).suffix
    return "jsonl" if suffix in JSONL_SUFFIXES else TABLE_SUFFIXES.get(suffix, "text")
