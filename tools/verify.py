"""`seqmesh verify`: reads a whole shard set and lists everything in it that is not as it should be.

Every file that the manifest names is compared with it in size and checksum, then read: types, row and token counts,
offsets, ids, sources, names, and the lengths index against the shards. A file that is missing or has another size is
not read further. What else the folder holds is a warning. Nothing is changed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import LENGTHS_NAME, MANIFEST_NAME, FileEntry, Manifest, read_manifest
from seqmesh.tools.claim import LOCK_NAME, QUARANTINE_NAME, TOKENIZER_NAMES
from seqmesh.tools.journal import JOURNAL_NAME
from seqmesh.tools.shard_checks import (
    INDEX_TYPES,
    Index,
    Types,
    column_problems,
    index_of,
    index_problems,
    open_table,
    shard_problems,
    shard_types,
)
from seqmesh.tools.units.filters import FILTERED

QUIET_SECONDS = 5.0  # between lines of progress where there is no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong with a file of the set. A warning does not make the set unfit."""

    file: str
    what: str
    warning: bool = False


def _ignore(_: float) -> None:
    """For callers that want no progress."""


def verify_set(folder: Path, *, progress: Callable[[float], None] = _ignore) -> list[Problem]:
    """All problems of a set, by file. `progress` hears the share of bytes that are read.

    Raises FileNotFoundError where the folder holds no manifest.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [Problem(file=MANIFEST_NAME, what=str(error))]
    problems = [Problem(file=MANIFEST_NAME, what=what) for what in _manifest_problems(manifest)]
    index, found = _check_index(folder, manifest.lengths)
    problems += [Problem(file=manifest.lengths.file, what=what) for what in found]
    entries = (manifest.lengths, *manifest.shards)
    read = list(accumulate(entry.bytes for entry in entries))
    first = 0
    for entry, done in zip(manifest.shards, read[1:], strict=True):
        expected = index.part(first, entry.rows) if index is not None else None
        problems += [Problem(file=entry.file, what=what) for what in _check_shard(folder, entry, manifest, expected)]
        first += entry.rows
        progress(done / max(read[-1], 1))
    problems += _companion_problems(folder, manifest)
    return problems


def run(*, folder: Path, console: Console | None = None) -> None:
    """The whole command. Raises ValueError, after listing all problems, where the set is not fit for use."""
    console = console or Console()
    started = time.perf_counter()
    with _progress(console) as progress:
        problems = verify_set(folder, progress=progress)
    if problems:
        console.print(_problem_table(problems))
    errors = [problem for problem in problems if not problem.warning]
    if errors:
        files = len({problem.file for problem in errors})
        raise ValueError(
            f"{folder} is not whole: {len(errors)} problem{'s' * (len(errors) > 1)} in {files} "
            f"file{'s' * (files > 1)}; copy the set again or prepare it anew"
        )
    console.print(Text(f"{folder}: ok"), soft_wrap=True)
    console.print(_ok_table(read_manifest(folder), time.perf_counter() - started))


def _manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Contradictions inside the manifest that its own reader lets pass."""
    names = Counter(entry.file for entry in (manifest.lengths, *manifest.shards))
    yield from (f"names {name} {count} times" for name, count in names.items() if count > 1)
    for what, id in (("eod_id", manifest.eod_id), ("bod_id", manifest.bod_id)):
        if id is not None and not 0 <= id < manifest.vocab_size:
            yield f"{what} is {id}: not in a vocabulary of {manifest.vocab_size}"
    if len(set(manifest.sources)) != len(manifest.sources):
        yield "names a source twice"
    counts = manifest.counts
    for name, found in (("documents_out", manifest.documents), ("tokens_out", manifest.tokens)):
        if counts.get(name, found) != found:
            yield f"counts.{name} is {counts[name]:,}: the shards have {found:,}"
    if {"documents_in", "documents_out", "empty", "refused"} <= counts.keys():
        parts = sum(counts.get(name, 0) for name in ("documents_out", "empty", "refused", *FILTERED))
        if counts["documents_in"] != parts:
            yield f"counts.documents_in is {counts['documents_in']:,}: documents_out and all left out make {parts:,}"


def _check_index(folder: Path, entry: FileEntry) -> tuple[Index | None, list[str]]:
    """What the index says, None where it is not usable, and what is wrong with it."""
    table, found = _opened(folder, entry, INDEX_TYPES)
    if table is None:
        return None, found
    return index_of(table), [*found, *index_problems(table, entry)]


def _check_shard(folder: Path, entry: FileEntry, manifest: Manifest, index: Index | None) -> list[str]:
    table, found = _opened(folder, entry, shard_types(manifest))
    if table is None:
        return found
    return [*found, *shard_problems(table, entry, manifest, index)]


def _opened(folder: Path, entry: FileEntry, types: Types) -> tuple[pa.Table | None, list[str]]:
    """A file of the set and what is wrong with it as a file. No table where its content cannot be read."""
    path = folder / entry.file
    found = list(_file_problems(path, entry))
    if not path.is_file() or path.stat().st_size != entry.bytes:  # with its size a file loses the place of everything
        return None, found
    try:
        table = open_table(path)
    except ValueError as error:
        return None, [*found, str(error)]
    unfit = column_problems(table, types)
    return (None if unfit else table), found + unfit


def _file_problems(path: Path, entry: FileEntry) -> Iterator[str]:
    if not path.is_file():
        yield "is missing"
        return
    size = path.stat().st_size
    if size != entry.bytes:
        what = "cut short" if size < entry.bytes else "too long"
        yield f"is {what}: {size:,} bytes, the manifest says {entry.bytes:,}"
    elif (found := checksum(path)) != entry.xxh3:
        yield f"its checksum is {found}, the manifest says {entry.xxh3}"


def _companion_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Files that a set has beside those in the manifest, and files that nobody knows."""
    known = {entry.file for entry in (manifest.lengths, *manifest.shards)}
    known |= {MANIFEST_NAME, LENGTHS_NAME, *TOKENIZER_NAMES, QUARANTINE_NAME}
    for path in sorted(folder.iterdir()):
        if path.name in (JOURNAL_NAME, LOCK_NAME) or path.name.endswith(".tmp"):
            yield Problem(file=path.name, what="is left of a run of prepare that did not end", warning=True)
        elif path.name not in known:
            yield Problem(file=path.name, what="is not part of the set", warning=True)
    name = next((name for name in TOKENIZER_NAMES if (folder / name).is_file()), None)
    if name and (what := _tokenizer_problem(folder, manifest)):
        yield Problem(file=name, what=what)
    if (folder / QUARANTINE_NAME).is_file() and "refused" in manifest.counts:
        with (folder / QUARANTINE_NAME).open("rb") as file:
            lines = sum(1 for _ in file)
        if lines != manifest.counts["refused"]:
            what = f"holds {lines:,} records, the manifest says {manifest.counts['refused']:,} were refused"
            yield Problem(file=QUARANTINE_NAME, what=what)


def _tokenizer_problem(folder: Path, manifest: Manifest) -> str | None:
    from seqmesh.tools.tokenizers.file import load_recorded  # slow to import

    try:
        file = load_recorded(folder, manifest)
    except ValueError as error:
        return str(error)
    if file.vocab_size != manifest.vocab_size:
        return f"has a vocabulary of {file.vocab_size}, the manifest says {manifest.vocab_size}"
    return None


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[float], None]]:
    """A live bar on a terminal; elsewhere at most one line every QUIET_SECONDS."""
    if not console.is_terminal:
        last = time.perf_counter()

        def line(share: float) -> None:
            nonlocal last
            if time.perf_counter() - last >= QUIET_SECONDS:
                last = time.perf_counter()
                console.print(f"{share:.0%} of the bytes read", highlight=False)

        yield line
        return
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("reading", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _problem_table(problems: list[Problem]) -> Table:
    table = Table("file", title="problems", title_justify="left")
    table.add_column("what", overflow="fold")
    for problem in problems:
        table.add_row(Text(problem.file), Text(("warning: " if problem.warning else "") + problem.what))
    return table


def _ok_table(manifest: Manifest, seconds: float) -> Table:
    size = sum(entry.bytes for entry in (manifest.lengths, *manifest.shards))
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("documents", f"{manifest.documents:,}")
    table.add_row("tokens", f"{manifest.tokens:,}")
    table.add_row("shards", f"{len(manifest.shards):,}")
    table.add_row("bytes read", f"{size:,} in {seconds:.1f} s")
    return table
