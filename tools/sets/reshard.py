"""`seqmesh reshard`: the documents of a shard set in shards of another size, in their order or in a drawn one.

In their order the new set is, byte for byte, what `prepare` makes with that size. Drawn: place i holds document
`permute(i, N, shuffle_key(seed, 0))`, the keyed bijection that the loader's global shuffle uses, so that the order is
known without being kept. Memory: one new shard, the lengths of all documents, and what the system keeps of the mapped
old ones; a set at a URL is copied to the cache's disk, a shard at a time, or all of them where the order is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from seqmesh.loader.manifest import Manifest
from seqmesh.packer.permute import permutation, shuffle_key
from seqmesh.tools.sets.blocks import Block, Shelf, add_block
from seqmesh.tools.sets.carry import copy_quarantines, copy_tokenizer
from seqmesh.tools.sets.folder import new_folder
from seqmesh.tools.sets.progress import Share, ignore, progress_on, say_made
from seqmesh.tools.sets.reading import BLOCK_TOKENS, InputSet
from seqmesh.tools.sets.remake import writer_like
from seqmesh.tools.shard_writer import DEFAULT_SHARD_TOKENS

WINDOW = 1 << 16  # documents of a drawn order that are looked up in one go, at most


def reshard_set(
    data: str,
    out: Path,
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    shuffle_seed: int | None = None,
    progress: Share = ignore,
) -> Manifest:
    """Make the set. shuffle_seed: of the drawn order. Raises ValueError for another format or an unfit setting,
    ShardError for a damaged shard, FileExistsError where `out` exists."""
    given = InputSet(data)
    manifest, done, total = given.manifest, 0, max(given.tokens, 1)
    with new_folder(out, inputs=[data]) as folder, writer_like(manifest, folder, shard_tokens) as writer:
        writer.counts.update(manifest.counts)
        for block in given.blocks() if shuffle_seed is None else _drawn(given, shuffle_seed):
            add_block(writer, block, given.catalog.sources)
            done += int(block.lengths.sum())
            progress(done / total)
        copy_tokenizer([given], folder)
        copy_quarantines([given], folder)
        return writer.finish()


def run(*, data: str, out: Path, shard_tokens: int, shuffle_seed: int | None, console: Console | None = None) -> None:
    """The whole command."""
    console = console or Console()
    with progress_on(console, "resharding", "tokens written") as progress:
        made = reshard_set(data, out, shard_tokens=shard_tokens, shuffle_seed=shuffle_seed, progress=progress)
    say_made(console, out, made)


def _drawn(given: InputSet, seed: int) -> Iterator[Block]:
    shelf = Shelf([block for number in range(len(given.catalog.parts)) for block in given.part(number)])
    key, count = shuffle_key(seed, 0), len(given)
    for start in range(0, count, WINDOW):
        documents = permutation(count, key, start, min(start + WINDOW, count))
        ends = np.cumsum(given.catalog.lengths[documents])
        first = 0
        while first < len(documents):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + BLOCK_TOKENS, side="right")), first + 1)
            yield shelf.take(documents[first:last])
            first = last
