"""Running loaders, so that they can be found: each that serves leaves a small file in its private folder.

`registered` writes and removes it, `entries` reads those of this user. A file may outlive its process, which it names
for certain.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.files import atomic_write
from seqmesh.loader.folder import Process, private_folder, private_folders
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.settings import LoaderSettings

NAME = "loader.json"  # in a private folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A loader that serves, or served when it was killed. since: when it began to. options: see `ServeOptions`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    process: Process
    endpoint: str
    data: str
    ranks: int
    since: datetime
    options: ServeOptions


_ADAPTER = TypeAdapter(Entry)


@contextlib.contextmanager
def registered(
    settings: LoaderSettings, endpoint: str, options: ServeOptions, folder: Path | None = None
) -> Iterator[None]:
    """While the block runs this process can be found. folder: its private folder; by default a new one, for the file
    alone."""
    if endpoint.startswith("ipc://"):  # others have other working folders
        endpoint = f"ipc://{os.path.abspath(endpoint.removeprefix('ipc://'))}"
    entry = Entry(
        process=Process.this(),
        endpoint=endpoint,
        data=settings.data,
        ranks=settings.ranks,
        since=datetime.now(UTC),
        options=options,
    )
    home = folder or private_folder()
    try:
        atomic_write(home / NAME, _ADAPTER.dump_json(entry))
        yield
    finally:
        if folder is None:
            shutil.rmtree(home, ignore_errors=True)
        else:
            (home / NAME).unlink(missing_ok=True)


def entries(place: Path) -> Iterator[tuple[Path, Entry]]:
    """What loaders of this user have left in the private folders of a place, and in which. Files that are none of ours
    are passed over."""
    for folder, _ in private_folders(place):
        with contextlib.suppress(OSError, ValidationError):
            yield folder, _ADAPTER.validate_json((folder / NAME).read_bytes())
