"""`seqmesh verify`: reads a whole shard set and lists everything in it that is not as it should be.

The manifest is compared with its own checksum. Every file that it names is compared with it in size and checksum, then
read: types, row and token counts, offsets, ids, sources, names, and the lengths index against the shards. A file that
is missing or has another size is not read further. What else the folder holds is a warning. Nothing is changed. Several
shards are read at a time, each byte once. Checkpoints of training jobs are checked by `verify_checkpoint`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import xxhash
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import (
    COMPANIONS,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    manifest_bytes,
    read_manifest,
)
from seqmesh.tools import verify_checkpoint
from seqmesh.tools.claim import LOCK_NAME, TOKENIZER_NAMES
from seqmesh.tools.journal import JOURNAL_NAME
from seqmesh.tools.one_pass import Numbers, read_once
from seqmesh.tools.sets.progress import Share, ignore, progress_on
from seqmesh.tools.shard_checks import (
    INDEX_TYPES,
    Index,
    Types,
    column_problems,
    id_ranges,
    index_of,
    index_problems,
    open_table,
    shard_problems,
    shard_types,
)
from seqmesh.tools.units.filters import FILTERED
from seqmesh.tools.verify_checkpoint import holds_checkpoint

THREADS = 4  # at most: memory is the limit soon


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong with a file of the set. A warning does not make the set unfit."""

    file: str
    what: str
    warning: bool = False


def verify_set(folder: Path, *, progress: Share = ignore) -> list[Problem]:
    """All problems of a set, by file. `progress` hears the share of bytes that are read.

    Raises FileNotFoundError where the folder holds no manifest.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [Problem(file=MANIFEST_NAME, what=str(error))]
    problems = [*_manifest_problems(folder, manifest)]
    index, found = _check_index(folder, manifest.lengths)
    problems += [Problem(file=manifest.lengths.file, what=what) for what in found]
    entries = (manifest.lengths, *manifest.shards)
    read = list(accumulate(entry.bytes for entry in entries))
    ends = accumulate(entry.rows for entry in manifest.shards)
    parts = [index and index.part(end - e.rows, e.rows) for e, end in zip(manifest.shards, ends, strict=True)]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        checked = pool.map(lambda entry, part: _check_shard(folder, entry, manifest, part), manifest.shards, parts)
        for entry, done, found in zip(manifest.shards, read[1:], checked, strict=True):
            problems += [Problem(file=entry.file, what=what) for what in found]
            progress(done / max(read[-1], 1))
    return [*problems, *_companion_problems(folder, manifest)]


def run(*, folder: Path, console: Console | None = None) -> None:
    """The whole command. Raises ValueError, after listing all problems, where the set is not fit for use."""
    console = console or Console()
    if holds_checkpoint(folder):
        verify_checkpoint.run(folder=folder, console=console)
        return
    started = time.perf_counter()
    with progress_on(console, "reading", "bytes read") as progress:
        problems = verify_set(folder, progress=progress)
    for problem in problems:
        what = "warning: " * problem.warning + problem.what
        console.print(Text(f"{problem.file}: {what}"), soft_wrap=True)
    errors = [problem for problem in problems if not problem.warning]
    if errors:
        files = len({problem.file for problem in errors})
        raise ValueError(
            f"{folder} is not whole: {len(errors)} problem{'s' * (len(errors) > 1)} in {files} "
            f"file{'s' * (files > 1)}; copy the set again or prepare it anew"
        )
    console.print(Text(f"{folder}: ok"), soft_wrap=True)
    console.print(_ok_table(read_manifest(folder), time.perf_counter() - started))


def _manifest_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    found = (folder / MANIFEST_NAME).read_bytes()
    digest = xxhash.xxh3_128_hexdigest(manifest_bytes(replace(manifest, xxh3="")))
    if not manifest.xxh3:
        what = "has no checksum of its own, as sets of earlier versions: a change of it may go unseen"
        yield Problem(file=MANIFEST_NAME, what=what, warning=True)
    elif found != manifest_bytes(replace(manifest, xxh3=digest)):
        yield Problem(file=MANIFEST_NAME, what=f"was changed: its checksum is {digest}, it says {manifest.xxh3}")
    yield from (Problem(file=MANIFEST_NAME, what=what) for what in _contradictions(manifest))


def _contradictions(manifest: Manifest) -> Iterator[str]:
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
    file, found = _mapped(folder / entry.file, entry)
    table = _opened(file, INDEX_TYPES, found)
    found += _checksum_problems(folder, entry, file, ())[0]
    if table is None:
        return None, found
    index = index_of(table)
    return index, [*found, *index_problems(table, index, entry)]


def _check_shard(folder: Path, entry: FileEntry, manifest: Manifest, index: Index | None) -> list[str]:
    file, found = _mapped(folder / entry.file, entry)
    table = _opened(file, shard_types(manifest), found)
    ranges = id_ranges(table, file) if table is not None and file is not None else None
    damage, largest = _checksum_problems(folder, entry, file, ranges or ())
    found += damage
    if table is None:
        return found
    unknown = manifest.vocab_size if ranges is None else 0
    return [*found, *shard_problems(table, entry, manifest, index, max(largest, default=unknown))]


def _mapped(path: Path, entry: FileEntry) -> tuple[pa.Buffer | None, list[str]]:
    """The bytes of a file, None where it is not as long as it must be, and what is wrong then."""
    if not path.is_file():
        return None, ["is missing"]
    size = path.stat().st_size
    if size == entry.bytes:
        with pa.memory_map(str(path)) as file:
            return file.read_buffer(size), []
    what = "cut short" if size < entry.bytes else "too long"  # with its size a file loses the place of everything
    return None, [f"is {what}: {size:,} bytes, the manifest says {entry.bytes:,}"]


def _opened(file: pa.Buffer | None, types: Types, found: list[str]) -> pa.Table | None:
    """The content of a file; None where it cannot be read, and `found` says why."""
    if file is None:
        return None
    try:
        table = open_table(file)
    except ValueError as error:
        found.append(str(error))
        return None
    unfit = column_problems(table, types)
    found += unfit
    return None if unfit else table


def _checksum_problems(
    folder: Path, entry: FileEntry, file: pa.Buffer | None, ranges: Sequence[Numbers]
) -> tuple[list[str], list[int]]:
    """What the checksum of a file says, and the largest id in each range of it."""
    if file is None:
        return [], []
    xxh3, largest = read_once(folder / entry.file, ranges)
    return [f"its checksum is {xxh3}, the manifest says {entry.xxh3}"] * (xxh3 != entry.xxh3), largest


def _companion_problems(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Files that a set has beside those in the manifest, and files that nobody knows."""
    known = {entry.file for entry in (manifest.lengths, *manifest.shards)}
    known |= {MANIFEST_NAME, *(manifest.beside if manifest.xxh3 else COMPANIONS)}
    for path in sorted(folder.iterdir()):
        if path.name in (JOURNAL_NAME, LOCK_NAME) or path.name.endswith(".tmp"):
            yield Problem(file=path.name, what="is left of a run of prepare that did not end", warning=True)
        elif path.name not in known:
            yield Problem(file=path.name, what="is not part of the set", warning=True)
    name = next((name for name in TOKENIZER_NAMES if (folder / name).is_file()), None)
    if name and (what := _tokenizer_problem(folder, manifest)):
        yield Problem(file=name, what=what)
    for beside, xxh3 in manifest.beside.items():
        if not (folder / beside).is_file():
            yield Problem(file=beside, what="is missing")
        elif (found := checksum(folder / beside)) != xxh3:
            yield Problem(file=beside, what=f"its checksum is {found}, the manifest says {xxh3}")


def _tokenizer_problem(folder: Path, manifest: Manifest) -> str | None:
    from seqmesh.tools.tokenizers.file import load_recorded  # slow to import

    try:
        file = load_recorded(folder, manifest)
    except ValueError as error:
        return str(error)
    if file.vocab_size != manifest.vocab_size:
        return f"has a vocabulary of {file.vocab_size}, the manifest says {manifest.vocab_size}"
    return None


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
