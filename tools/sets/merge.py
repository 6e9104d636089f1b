"""`seqmesh merge`: one shard set of several that were made by the same tokenizer.

Documents in the order in which the sets are named, sources united by their names, counts summed. Shards stay as they
are cut: `seqmesh reshard` cuts them anew. A shard is linked (or copied, from another disk or a URL) where nothing in it
changes, and rewritten where its sources have other numbers in the new set.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from seqmesh.loader.manifest import LENGTHS_NAME, Manifest, write_manifest
from seqmesh.tools.sets.carry import (
    Gathered,
    carry_all,
    carry_same,
    check_alike,
    check_not_repeated,
    common_tokenizer,
    copy_quarantines,
    copy_tokenizer,
    summed,
    united,
)
from seqmesh.tools.sets.folder import new_folder
from seqmesh.tools.sets.progress import Share, ignore, progress_on, say_made, stretch
from seqmesh.tools.sets.reading import InputSet


def merge_sets(out: Path, data: Sequence[str], *, progress: Share = ignore) -> Manifest:
    """Make the set. Raises ValueError, naming the sets and both values, for sets of different tokenizers, vocabularies
    or ends of documents, and for sets that share shards; ShardError for a damaged shard that is to be rewritten;
    FileExistsError where `out` exists."""
    if not data:
        raise ValueError("no sets: name at least one shard set to merge")
    sets = [InputSet(each) for each in data]
    check_alike(sets)
    check_not_repeated([(each.data, each.manifest.shards) for each in sets])
    sources, total = united((), sets), max(sum(each.tokens for each in sets), 1)
    with new_folder(out, inputs=data) as folder:
        gathered, done = Gathered(), 0
        for each in sets:
            carry_all(each, folder, sources, gathered, stretch(progress, done / total, each.tokens / total))
            done += each.tokens
        if not gathered.shards and sets[0].catalog.parts:  # a set without documents has one shard without rows
            gathered.add(carry_same(sets[0], 0, folder / "shard-00000.arrow"), sets[0], 0, sets[0].codes(0))
        copy_tokenizer(sets, folder)
        copy_quarantines(sets, folder)
        return complete(folder, LENGTHS_NAME, sets, sources, gathered)


def complete(
    folder: Path, index_name: str, sets: Sequence[InputSet], sources: Sequence[str], gathered: Gathered
) -> Manifest:
    """Write the lengths index and the manifest of a folder that holds all shards of some sets."""
    lengths = gathered.write_index(folder / index_name)
    first = sets[0].manifest
    counts = summed([each.manifest for each in sets])
    manifest = Manifest(
        token_dtype=first.token_dtype,
        vocab_size=first.vocab_size,
        tokenizer=common_tokenizer([each.manifest for each in sets]),
        eod_id=first.eod_id,
        bod_id=first.bod_id,
        sources=tuple(sources),
        shards=tuple(gathered.shards),
        lengths=lengths,
        counts=counts | {"documents_out": lengths.rows, "tokens_out": lengths.tokens},
    )
    write_manifest(folder, manifest)
    return manifest


def run(*, out: Path, data: Sequence[str], console: Console | None = None) -> None:
    """The whole command."""
    console = console or Console()
    with progress_on(console, "merging", "tokens merged") as progress:
        manifest = merge_sets(out, data, progress=progress)
    say_made(console, out, manifest)
