"""Writes Megatron-Core's indexed datasets as its `IndexedDatasetBuilder` does, byte for byte: `text_document.bin` and
`.idx`, see `seqmesh.loader.formats.megatron`. Each document is one sequence."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from seqmesh.loader.files import sync_file
from seqmesh.loader.formats.megatron import DTYPES, MAGIC
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.sets.blocks import Block

NAME = "text_document"
SMALL_VOCABULARY = 65_500  # below it ids are of 16 bits there, else int32
MOST_TOKENS = (1 << 31) - 1  # of a sequence


def id_type(vocab_size: int) -> np.dtype[Any]:
    """What Megatron takes for the ids of a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < SMALL_VOCABULARY else np.int32)


class MegatronWriter:
    """Use it in a `with` block; leaving it writes the index."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._bin, self._index = folder / f"{NAME}.bin", folder / f"{NAME}.idx"
        self._dtype = id_type(vocab_size)
        self._lengths: list[Int64Array] = [np.zeros(0, np.int64)]
        self._file = self._bin.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            self._index.write_bytes(self._index_bytes())
            sync_file(self._bin)
            sync_file(self._index)

    def add(self, block: Block) -> None:
        """Raises ValueError for a document that is too long for the format."""
        if len(block) and int(block.lengths.max()) > MOST_TOKENS:
            raise ValueError(
                f"a document has {int(block.lengths.max()):,} tokens: Megatron's are below {MOST_TOKENS:,}"
            )
        self._file.write(np.ascontiguousarray(block.ids, self._dtype).data)
        self._lengths.append(block.lengths)

    def _index_bytes(self) -> bytes:
        lengths = np.concatenate(self._lengths)
        pointers = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))[: len(lengths)] * self._dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if self._dtype == dtype)
        head = MAGIC + (1).to_bytes(8, "little") + bytes([code])
        head += len(lengths).to_bytes(8, "little") + (len(lengths) + 1).to_bytes(8, "little")
        first = np.arange(len(lengths) + 1)
        return head + lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + first.astype("<i8").tobytes()
