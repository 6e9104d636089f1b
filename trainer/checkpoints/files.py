"""The second stage of a save: files, checksums, manifest, name. Called from a thread; knows nothing of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from seqmesh.loader.files import CHUNK_BYTES, sync_folder
from seqmesh.trainer.checkpoints.keep import drop_older, publish
from seqmesh.trainer.checkpoints.manifest import MANIFEST, FileEntry, manifest_bytes

Bytes = bytes | memoryview


def write_file(path: Path, pieces: Sequence[Bytes]) -> FileEntry:
    """Write a new file, durably; its checksum is that of the bytes in memory. Raises OSError naming the file."""
    digest, size = xxhash.xxh3_128(), 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for piece in pieces:
                for begin in range(0, len(piece), CHUNK_BYTES):
                    chunk = memoryview(piece)[begin : begin + CHUNK_BYTES]
                    _write(descriptor, chunk)
                    digest.update(chunk)
                    size += len(chunk)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(f"{path} can not be written: {error}") from error
    return FileEntry(bytes=size, xxh3=digest.hexdigest())


def _write(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


def complete(
    temporary: Path, final: Path, parts: Mapping[str, FileEntry], rest: Mapping[str, bytes], *, keep: int
) -> None:
    """Make a checkpoint of a folder that holds all ranks' `parts`: write the `rest` and the manifest, give it its name,
    then delete checkpoints beyond the newest `keep`. Raises OSError naming what can not be written, or is not there."""
    for name, entry in parts.items():
        if not (temporary / name).is_file() or (temporary / name).stat().st_size != entry.bytes:
            raise OSError(f"{temporary / name} is not there: all nodes must share the run folder")
    files = {**parts, **{name: write_file(temporary / name, [data]) for name, data in rest.items()}}
    write_file(temporary / MANIFEST, [manifest_bytes(files)])
    try:
        sync_folder(temporary)
        publish(temporary, final)
        drop_older(final, keep)
    except OSError as error:
        raise OSError(f"{final} can not be completed: {error}") from error
