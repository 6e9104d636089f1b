"""Small file helpers that every writer shares: atomic writes and checksums.

Takes local paths. A file appears under its final name only when all its bytes are on the disk; until then it has a
temporary name that ends in `.tmp`, which no reader opens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

CHUNK_BYTES = 1 << 22
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream whose writer was closed


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Force the bytes of a finished file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: Path, mark: str = "") -> Iterator[Path]:
    """Yield a temporary path; on a clean exit it is synced and renamed to `path`, on an exception it is removed. mark:
    part of the temporary name, where several may write the same file at once."""
    temporary = path.with_name(f"{path.name}{mark and '.'}{mark}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def checksum(path: Path) -> str:
    """xxh3-128 of a file's bytes, as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
