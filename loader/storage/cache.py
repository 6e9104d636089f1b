"""Where a machine keeps copies of data that can not be read in its place, and how much."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_BYTES = 32 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """folder: shared by all jobs of this user on this machine. limit: most bytes in it, whatever job they are of."""

    folder: Path
    limit: int = DEFAULT_BYTES

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"cache_bytes is {self.limit}: must be at least 1")
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"cache is {self.folder}: must be a folder, or not there yet")

    @classmethod
    def default(cls, folder: str | None = None, limit: int | None = None) -> Cache:
        """SEQMESH_CACHE, or `seqmesh` in the user's cache folder, where no folder is named."""
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        place = folder or os.environ.get("SEQMESH_CACHE") or Path(home) / "seqmesh" / "data"
        return cls(folder=Path(place).absolute(), limit=DEFAULT_BYTES if limit is None else limit)
