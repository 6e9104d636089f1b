"""Reads a file once, from its first byte to its last, for everything that must see all of its bytes: its checksum, and
the largest number in some ranges of it.

A block goes through a small buffer that stays in the processor's cache: what a memory map would cost in page faults is
saved, and memory is read once, however much is asked of it. The lock of the interpreter is free nearly all of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK_BYTES = 1 << 21  # fewer, larger readings are cheaper, and it still fits


@dataclass(frozen=True, slots=True)
class Numbers:
    """Where numbers of a type lie in a file: `count` of them from byte `start`, which is a multiple of their size."""

    start: int
    count: int
    dtype: np.dtype[Any]

    def in_block(self, block: npt.NDArray[np.uint8], place: int) -> npt.NDArray[Any]:
        """Those in a block that begins at byte `place`, which is a multiple of their size, too."""
        first = max(self.start - place, 0)
        last = min(self.start + self.count * self.dtype.itemsize - place, len(block))
        return block[first : max(first, last)].view(self.dtype)


def read_once(path: Path, ranges: Sequence[Numbers]) -> tuple[str, list[int]]:
    """xxh3-128 of a file in hexadecimal, and of each range the largest number, 0 where it is empty."""
    digest, largest, place = xxhash.xxh3_128(), [0] * len(ranges), 0
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    with path.open("rb", buffering=0) as file:
        while size := _fill(file, buffer):
            block = buffer[:size]
            digest.update(block.data)
            for number, each in enumerate(ranges):
                if len(found := each.in_block(block, place)):
                    largest[number] = max(largest[number], int(found.max()))
            place += size
    return digest.hexdigest(), largest


def _fill(file: Any, buffer: npt.NDArray[np.uint8]) -> int:
    """How many bytes were read: fewer than there is room for at the end of the file only."""
    size = 0
    while size < len(buffer) and (more := file.readinto(buffer[size:])):
        size += more
    return size
