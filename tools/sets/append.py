"""`seqmesh append`: the shards of other sets added to a shard set, in its own folder.

New shards first, then a lengths index under a new name, then the manifest, which replaces the old one in one step: a
run that ends early, in whatever way, leaves the old set whole. Files of such a run are replaced by the next one. A
loader that has the set open goes on with what it has read.

Not done here: refused records (`quarantine.jsonl`) of the other sets stay where they are, and are counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from seqmesh.loader.manifest import MANIFEST_NAME, Manifest, read_manifest
from seqmesh.tools.sets.carry import (
    Gathered,
    carry_all,
    check_alike,
    check_not_repeated,
    copy_tokenizer,
    united,
)
from seqmesh.tools.sets.folder import check_local, only_one
from seqmesh.tools.sets.merge import complete
from seqmesh.tools.sets.progress import Share, ignore, progress_on, say_made, stretch
from seqmesh.tools.sets.reading import InputSet
from seqmesh.tools.shard_writer import shard_name


def append_sets(folder: Path, data: Sequence[str], *, progress: Share = ignore) -> Manifest:
    """Add to the set in a folder. Raises as `merge_sets`, ValueError for a set at a URL or with files of other names
    than those of this project, BlockingIOError while another run adds to it."""
    if not data:
        raise ValueError("no sets: name at least one shard set to append")
    check_local(folder)
    if not (folder / MANIFEST_NAME).is_file():
        raise FileNotFoundError(f"{folder} is not a finished shard set: it has no {MANIFEST_NAME}")
    with only_one(folder, f"another command appends to {folder}: wait for it"):
        return _append(folder, data, progress)


def _append(folder: Path, data: Sequence[str], progress: Share) -> Manifest:
    own, others = InputSet(str(folder)), [InputSet(each) for each in data]
    check_alike([own, *others])
    check_not_repeated([(each.data, each.manifest.shards) for each in (own, *others)])
    gathered, kept = _kept(own), len(own.manifest.shards)
    sources, total = united(own.catalog.sources, others), max(sum(each.tokens for each in others), 1)
    done = 0
    try:
        for each in others:
            first = len(gathered.shards)
            carry_all(each, folder, sources, gathered, stretch(progress, done / total, each.tokens / total))
            check_not_repeated([(str(folder), gathered.shards[:first]), (each.data, gathered.shards[first:])])
            done += each.tokens
        if len(gathered.shards) == kept:
            return own.manifest
        if own.tokenizer() is None:
            copy_tokenizer(others, folder)
        manifest = complete(folder, f"lengths-{len(gathered.shards):05d}.arrow", [own, *others], sources, gathered)
    except BaseException:
        if read_manifest(folder).shards == own.manifest.shards:
            for entry in gathered.shards[kept:]:
                (folder / entry.file).unlink(missing_ok=True)
        raise
    (folder / own.manifest.lengths.file).unlink(missing_ok=True)
    return manifest


def _kept(own: InputSet) -> Gathered:
    """The shards that a set has. Raises ValueError where the names of new ones could be taken."""
    gathered = Gathered()
    for number, entry in enumerate(own.manifest.shards):
        if entry.file != shard_name(number):
            raise ValueError(f"{own.data}: shard {number} is called {entry.file}, not {shard_name(number)}: merge it")
        gathered.add(entry, own, number, own.codes(number))
    return gathered


def run(*, folder: Path, data: Sequence[str], console: Console | None = None) -> None:
    """The whole command."""
    console = console or Console()
    with progress_on(console, "appending", "tokens appended") as progress:
        manifest = append_sets(folder, data, progress=progress)
    say_made(console, folder, manifest)
