"""Standard input as a file of JSONL, so that it can be read like any other: twice, by several processes, from anywhere.

What comes is written to a file without a name beside the output, which is gone with this process, however it ends; the
disk must have room for all of it. Its version is the checksum of the content, so an interrupted set is continued when
the same bytes are given again, and refused when others are.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import xxhash
from fsspec.implementations.local import LocalFileSystem

from seqmesh.tools.inputs import InputFile

CHUNK_BYTES = 1 << 20


@contextmanager
def spooled(stream: IO[bytes], folder: Path) -> Iterator[InputFile]:
    """All of `stream` as a file on the disk of `folder`, until the block ends. Raises OSError where it has no room."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        version = _copy(stream, file, folder)
        yield InputFile(
            filesystem=LocalFileSystem(),
            path=f"/proc/{os.getpid()}/fd/{file.fileno()}",  # other processes of the user can open it, too
            shown="standard input",
            name="stdin",
            source="stdin",
            kind="jsonl",
            size=os.fstat(file.fileno()).st_size,
            version=version,
        )


def _copy(stream: IO[bytes], file: IO[bytes], folder: Path) -> str:
    """Returns the checksum of what was copied."""
    digest = xxhash.xxh3_128()
    try:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
        file.flush()
    except OSError as error:
        raise OSError(f"cannot keep standard input on the disk of {folder} while it is read: {error}") from error
    return digest.hexdigest()
