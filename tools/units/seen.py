"""Which texts a run has met, by hash, and the file that remembers those of finished shards.

`texts.xxh3` lies in the output folder while a run that removes duplicates is unfinished: HASH_BYTES a document, in the
order of the input. A shard's hashes are on the disk before the journal speaks of the shard, with a checksum; what comes
after the last shard is cut off and met again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from seqmesh.tools.units.filters import HASH_BYTES

SEEN_NAME = "texts.xxh3"


class Seen:
    """Hashes of the texts so far. Memory: about 110 bytes a text that is kept."""

    def __init__(self, hashes: bytes = b"") -> None:
        self._known = {hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)}

    def new(self, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Which of the texts are not known yet, and know them from now on."""
        fresh = []
        for at in range(0, len(hashes), HASH_BYTES):
            before = len(self._known)
            self._known.add(hashes[at : at + HASH_BYTES])
            fresh.append(len(self._known) > before)
        return np.array(fresh, np.bool_)


def remember(folder: Path, hashes: bytes) -> str:
    """Add a shard's hashes to the file and force them to the disk. Returns their checksum."""
    with (folder / SEEN_NAME).open("ab") as file:
        file.write(hashes)
        file.flush()
        os.fsync(file.fileno())
    return _checksum(hashes)


def remembered(folder: Path, shards: Sequence[tuple[int, str]]) -> list[bytes]:
    """Hashes of the shards, given their documents and checksums, up to the first whose hashes are damaged or lost."""
    path, found = folder / SEEN_NAME, []
    if path.is_file():
        with path.open("rb") as file:
            for documents, checksum in shards:
                hashes = file.read(documents * HASH_BYTES)
                if len(hashes) != documents * HASH_BYTES or _checksum(hashes) != checksum:
                    break
                found.append(hashes)
    return found


def restart(folder: Path, hashes: Sequence[bytes]) -> None:
    """Cut the file back to what the kept shards have."""
    with (folder / SEEN_NAME).open("ab") as file:
        file.truncate(sum(map(len, hashes)))


def _checksum(hashes: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(hashes)
