"""`seqmesh inspect --shuffle`: how well the documents of a set are mixed, and which of its files that needs together.

Orders are those that the loader serves without a mixture; no token is read. Of a mixture each source is shuffled by
itself, in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqmesh.loader.manifest import Manifest, read_manifest
from seqmesh.loader.settings import Blocks
from seqmesh.packer.blocks import FIRST, OPENS, block_permutation, block_table
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.neighbours import Neighbours, neighbours
from seqmesh.packer.permute import permutation, shuffle_key
from seqmesh.tools.output import print_whole

WINDOWS = (4, 16, 64)
NOTES = (
    "distance: between documents that come one after the other, where they are stored, as a part of the set;"
    " 33.3 % to expect of a perfect shuffle",
    "kept: of documents that come one after the other, those that are stored beside each other",
    "at a time: files that are needed together, the most of any in the epoch",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleOptions:
    """windows: of shuffles by blocks, in files; by default a few that are smaller than the set."""

    windows: tuple[int, ...] = ()
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        for window in self.windows:
            Blocks(window=window)  # raises ValueError for one that the loader refuses
        for name in ("seed", "epoch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleResult:
    """One order of an epoch: how well it is mixed, the most files, and the most bytes of files, of any at a time."""

    name: str
    neighbours: Neighbours
    files: int
    bytes: int


def compare_shuffles(rows: Int64Array, sizes: Int64Array, options: ShuffleOptions) -> tuple[ShuffleResult, ...]:
    """From the order of the set to the global shuffle. rows, sizes [P]: documents and bytes of each file. Raises
    ValueError where there are no two documents."""
    if (count := int(rows.sum())) < 2:
        raise ValueError(f"the set has {count} documents: there is nothing to shuffle")
    held = rows > 0
    return tuple(_compared(np.append(0, np.cumsum(rows[held])), sizes[held], options))


def run(folder: Path, options: ShuffleOptions, console: Console) -> None:
    """Print the table. Raises ValueError or OSError for a set that can not be read, or has nothing to shuffle."""
    manifest = read_manifest(folder)
    with console.status("shuffling ..."):
        results = compare_shuffles(*_files(manifest), options)
    console.print(Text(str(folder)), soft_wrap=True)
    print_whole(console, _table(results, manifest, options))
    for note in NOTES:
        console.print(note, style="dim", soft_wrap=True, highlight=False)


def _files(manifest: Manifest) -> tuple[Int64Array, Int64Array]:
    rows, sizes = [shard.rows for shard in manifest.shards], [shard.bytes for shard in manifest.shards]
    return np.array(rows, np.int64), np.array(sizes, np.int64)


def _compared(first: Int64Array, sizes: Int64Array, options: ShuffleOptions) -> Iterator[ShuffleResult]:
    key, count = shuffle_key(options.seed, options.epoch), int(first[-1])
    files = np.arange(len(sizes))

    def result(name: str, order: Int64Array, windows: list[Int64Array]) -> ShuffleResult:
        files, most = max(map(len, windows)), max(int(sizes[window].sum()) for window in windows)
        return ShuffleResult(name=name, neighbours=neighbours(order), files=files, bytes=most)

    yield result("as stored", np.arange(count), np.split(files, len(files)))
    for window in options.windows or [window for window in WINDOWS if window < len(files)]:
        yield result(f"blocks, window {window}", block_permutation(first, window, key), _windows_of(first, window, key))
    yield result("global", permutation(count, key), [files])


def _windows_of(first: Int64Array, window: int, key: int) -> list[Int64Array]:
    """The numbers of the files in each window."""
    table = block_table(first, window, key)
    numbers = np.searchsorted(first, table[:, FIRST], side="right") - 1
    return np.split(numbers, np.flatnonzero(np.diff(table[:, OPENS])) + 1)


def _table(results: tuple[ShuffleResult, ...], manifest: Manifest, options: ShuffleOptions) -> Table:
    title = f"{manifest.documents:,} documents in {len(manifest.shards):,} files, seed {options.seed}, "
    table = Table("order", title=title + f"epoch {options.epoch}", title_justify="left")
    for name in ("distance", "first 1 %", "middle 1 %", "last 1 %", "kept", "files at a time", "bytes at a time"):
        table.add_column(name, justify="right")
    whole = sum(shard.bytes for shard in manifest.shards)
    for result in results:
        found = result.neighbours
        distances = (found.overall, found.first, found.middle, found.last)
        table.add_row(
            result.name,
            *(f"{distance:.1%}" for distance in distances),
            f"{found.kept:.2%}",
            f"{result.files:,}",
            f"{result.bytes:,} ({result.bytes / whole:.1%})",
        )
    return table
