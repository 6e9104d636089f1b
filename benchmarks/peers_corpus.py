"""What peers read: a corpus of documents, and what their loaders need in common.

A corpus is a folder with `tokens.bin` (int32) and `lengths.npy`. Needs numpy; torch and pyarrow where they are asked
for, since a peer's own environment may lack them. Nothing else of seqmesh is imported here or by the peers' modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 4_096  # tokens of those that read blocks of a fixed size
SHARD_DOCUMENTS = 4_096  # of a tar file, a parquet file or a chunk of a column
SHUFFLE_BUFFER = 1_000  # documents, where a peer shuffles in a buffer
SEED = 7

Int32Array = npt.NDArray[np.int32]


class Corpus:
    """The first `documents` documents of a corpus folder. tokens: memory-mapped; copy on write, since torch warns of
    memory that can not be written. bounds: document i is tokens bounds[i] to bounds[i + 1]. A worker that gets it
    opens it again."""

    def __init__(self, folder: Path, documents: int) -> None:
        self.folder, self.documents = folder, documents
        self.lengths: npt.NDArray[np.int64] = np.load(folder / "lengths.npy")[:documents]
        self.bounds: list[int] = [0, *np.cumsum(self.lengths).tolist()]
        self.tokens: Int32Array = np.memmap(folder / "tokens.bin", np.int32, mode="c")

    def __reduce__(self) -> tuple[type[Corpus], tuple[Path, int]]:
        return Corpus, (self.folder, self.documents)

    def document(self, index: int) -> Int32Array:
        return self.tokens[self.bounds[index] : self.bounds[index + 1]]

    def packs(self, pack: int) -> Iterator[list[int]]:
        """All documents in a shuffled order, as many in each pack as fit."""
        lengths = self.lengths.tolist()
        chosen: list[int] = []
        room = pack
        for index in np.random.default_rng(SEED).permutation(len(lengths)).tolist():
            if lengths[index] > room and chosen:
                yield chosen
                chosen, room = [], pack
            chosen.append(index)
            room -= lengths[index]
        if chosen:
            yield chosen

    def documents_of(self, pack: int) -> int:
        """How many documents have `pack` tokens on average."""
        return max(1, round(pack / float(self.lengths.mean())))


def concatenated(documents: list[Any]) -> tuple[Any, Any]:
    """Arrays or tensors one after the other, as a tensor, and the boundaries."""
    torch = import_module("torch")
    lengths = torch.tensor([0, *map(len, documents)], dtype=torch.int32)
    return torch.cat([torch.as_tensor(each) for each in documents]), lengths.cumsum(0, dtype=torch.int32)


def concatenated_rows(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
    return concatenated([row["tokens"] for row in rows])


def columns(corpus: Corpus) -> Iterator[Any]:
    """The documents as Arrow tables of one column, SHARD_DOCUMENTS rows each."""
    arrow = import_module("pyarrow")
    for first in range(0, len(corpus.lengths), SHARD_DOCUMENTS):
        bounds = np.array(corpus.bounds[first : first + SHARD_DOCUMENTS + 1])
        values = arrow.array(corpus.tokens[bounds[0] : bounds[-1]])
        yield arrow.table({"tokens": arrow.ListArray.from_arrays(arrow.array(bounds - bounds[0], "int32"), values)})
