"""A text corpus from what is already on the machine: Python sources, as JSONL.

Reads the interpreter's standard library and its installed distributions. One `.py` file is one document with the
fields `id` (path inside its library), `text`, `source` (`stdlib`, the distribution's name, or `unrecorded` where no
distribution lists the file) and `license`. Exact duplicates, files without text and files that are not UTF-8 are left
out and counted. The order is a shuffle that depends on the seed and the ids only, so that a part of it is a fair
sample. The same environment gives the same bytes. `LICENSES.json` beside it says what each source's licence is.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqmesh.loader.files import atomic_path, atomic_write

STDLIB = "stdlib"
STDLIB_LICENSE = "PSF-2.0"
UNRECORDED = "unrecorded"
UNKNOWN_LICENSE = "unknown"
LICENSES_NAME = "LICENSES.json"
TOP_SOURCES = 10
LONGEST_NAME = 100  # characters; a longer line of a License field is prose, not a name


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One `.py` file: where it is, and what its document says about it."""

    path: str
    doc_id: str
    source: str
    license: str


@dataclass(slots=True, kw_only=True)
class SourceTotal:
    """What one source gave."""

    documents: int = 0
    bytes: int = 0
    license: str = UNKNOWN_LICENSE


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """What was written. `bytes` counts text; `found` files were there, of which not all need have been read."""

    documents: int
    bytes: int
    found: int
    duplicates: int
    empty: int
    not_utf8: int
    sources: dict[str, SourceTotal]


def build_corpus(out: Path, *, seed: int = 0, max_bytes: int | None = None) -> CorpusReport:
    """Write the corpus to `out` (replacing it) and LICENSES.json beside it.

    `max_bytes` ends it with the document that reaches that much text. Raises ValueError for an unfit limit, OSError
    where the folder cannot be written.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}: must be at least 1")
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: give the name of the file to write")
    out.parent.mkdir(parents=True, exist_ok=True)
    files = shuffled(find_sources(), seed)
    with atomic_path(out) as path, path.open("wb") as stream:
        writer = _Writer(stream)
        for file in files:
            if max_bytes is not None and writer.bytes >= max_bytes:
                break
            writer.add(file)
    report = writer.report(found=len(files))
    atomic_write(out.parent / LICENSES_NAME, _licenses(report))
    return report


def run(*, out: Path, seed: int = 0, max_bytes: int | None = None, console: Console | None = None) -> CorpusReport:
    """The whole command: build the corpus, then a table of what is in it."""
    console = console or Console()
    with console.status("reading Python sources"):
        report = build_corpus(out, seed=seed, max_bytes=max_bytes)
    console.print(Text(str(out)), soft_wrap=True)
    console.print(_table(report))
    left_out = f"{report.duplicates:,} duplicates, {report.empty:,} empty, {report.not_utf8:,} not UTF-8"
    console.print(f"{report.found:,} files found; left out: {left_out}", highlight=False)
    return report


def find_sources() -> list[SourceFile]:
    """Every `.py` file of the standard library and of the site-packages folders."""
    paths = sysconfig.get_paths()
    sites = sorted({paths["purelib"], paths["platlib"]})
    owners = _owners(sites)
    unrecorded = (UNRECORDED, UNKNOWN_LICENSE)
    found = [
        SourceFile(path=path, doc_id=f"{STDLIB}/{relative}", source=STDLIB, license=STDLIB_LICENSE)
        for path, relative in _python_files(paths["stdlib"])
    ]
    for site in sites:
        for path, relative in _python_files(site):
            source, license = owners.get(os.path.realpath(path), unrecorded)
            found.append(SourceFile(path=path, doc_id=f"site-packages/{relative}", source=source, license=license))
    return found


def shuffled(files: Iterable[SourceFile], seed: int) -> list[SourceFile]:
    """The files in the order of a hash of seed and id."""
    return sorted(files, key=lambda file: (xxhash.xxh3_128_digest(f"{seed} {file.doc_id}".encode()), file.doc_id))


def license_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """A distribution's licence in a few words.

    Taken from License-Expression, else a License field of one line, else the classifiers, else the first line of the
    licence's text, which some put into the License field.
    """
    expression, field = (str((metadata.get_all(name) or [""])[0]).strip() for name in ("License-Expression", "License"))
    classifiers = metadata.get_all("Classifier") or []
    classified = "; ".join(
        dict.fromkeys(str(c).rsplit(" :: ", 1)[-1] for c in classifiers if c.startswith("License ::"))
    )
    lines = field.splitlines() or [""]
    title = "" if lines[0] == "UNKNOWN" or len(lines[0]) > LONGEST_NAME else lines[0].strip()
    return expression or (title if len(lines) == 1 else "") or classified or title or UNKNOWN_LICENSE


class _Writer:
    """Writes documents that are text and new, and counts the others."""

    def __init__(self, stream: Any) -> None:
        self.bytes = 0
        self._stream = stream
        self._seen: set[bytes] = set()
        self._sources: dict[str, SourceTotal] = {}
        self._duplicates = self._empty = self._not_utf8 = 0

    def add(self, file: SourceFile) -> None:
        with open(file.path, "rb") as stream:
            data = stream.read()
        digest = xxhash.xxh3_128_digest(data)
        if not data.strip():
            self._empty += 1
        elif digest in self._seen:
            self._duplicates += 1
        elif (text := _decoded(data)) is None:
            self._not_utf8 += 1
        else:
            self._seen.add(digest)
            self._write(file, text, len(data))

    def report(self, *, found: int) -> CorpusReport:
        return CorpusReport(
            documents=sum(total.documents for total in self._sources.values()),
            bytes=self.bytes,
            found=found,
            duplicates=self._duplicates,
            empty=self._empty,
            not_utf8=self._not_utf8,
            sources=dict(sorted(self._sources.items())),
        )

    def _write(self, file: SourceFile, text: str, size: int) -> None:
        fields = {"id": file.doc_id, "text": text, "source": file.source, "license": file.license}
        self._stream.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
        total = self._sources.setdefault(file.source, SourceTotal(license=file.license))
        total.documents += 1
        total.bytes += size
        self.bytes += size


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _python_files(root: str) -> Iterator[tuple[str, str]]:
    """Paths of the `.py` files below `root`, whole and relative; packages installed inside it are not its own."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in ("site-packages", "dist-packages"))
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(path):
                yield path, os.path.relpath(path, root).replace(os.sep, "/")


def _owners(sites: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Real path of each recorded `.py` file → (distribution, licence)."""
    owners: dict[str, tuple[str, str]] = {}
    for site in sites:
        for distribution in importlib.metadata.distributions(path=[site]):
            owner = (distribution.metadata["Name"], license_of(distribution.metadata))
            # The lines of RECORD, read directly: building a path object for each of them takes ten times as long.
            for line in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
                if line and line[0].endswith(".py"):
                    owners.setdefault(os.path.realpath(os.path.join(site, line[0])), owner)
    return owners


def _licenses(report: CorpusReport) -> bytes:
    sources = {name: asdict(total) for name, total in report.sources.items()}
    return json.dumps({"sources": sources}, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _table(report: CorpusReport) -> Table:
    table = Table("source")
    table.add_column("documents", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("license")
    largest = sorted(report.sources.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, total in largest[:TOP_SOURCES]:
        table.add_row(Text(name), f"{total.documents:,}", f"{total.bytes:,}", Text(total.license))
    table.add_section()
    table.add_row(f"{len(report.sources)} sources", f"{report.documents:,}", f"{report.bytes:,}", "")
    return table
