"""What commands that measure a shard set share: where their files may go, which data these are of, whole tables."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import MANIFEST_NAME, Manifest


def check_folders(*files: Path | None) -> None:
    """Raises FileNotFoundError for a file that has no folder to be in."""
    for path in files:
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: {path.parent} is no folder")


def identity(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Which documents these are, and which version read them."""
    return {
        "seqmesh": version("seqmesh"),
        "manifest_xxh3": checksum(folder / MANIFEST_NAME),
        "tokenizer": manifest.tokenizer,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
    }


def print_whole(console: Console, table: Table) -> None:
    """A table wider than the terminal, or than what rich takes a file to be, is not shortened."""
    width, most = console.width, console.options.update(max_width=1 << 10)
    console.width = max(width, console.measure(table, options=most).maximum)
    console.print(table)
    console.width = width


def print_written(console: Console, *files: Path | None) -> None:
    """One line for each file there is."""
    for path in filter(None, files):
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
