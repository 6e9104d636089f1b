"""`Block`: some documents of a set with all that belongs to them, cut, chosen from and put in another order.

A block is made of views wherever that is possible; nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.loader.chunks import SPAN_TYPE
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.shard_writer import ShardWriter

Codes = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Documents one after the other.

    first: number of the first in its set, −1 where they do not follow one another there. ids [T]: of all of them.
    lengths [R]: int64. doc_ids [R]: large_string. codes [R]: their sources, as places in the set's. targets [R]: their
    spans, large_list<int32>, null for a document without; None where the set keeps none for any.
    """

    first: int
    ids: npt.NDArray[Any]
    lengths: Int64Array
    doc_ids: Any
    codes: Codes
    targets: Any

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, start: int, stop: int) -> Block:
        """The documents start..stop−1 of it."""
        before = int(self.lengths[:start].sum())
        return self._part(start, stop, before, before + int(self.lengths[start:stop].sum()))

    def cut(self, most: int) -> Iterator[Block]:
        """All of it, in blocks of at most so many tokens, or of one document."""
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.lengths)))
        start = 0
        while start < len(self):
            stop = max(int(np.searchsorted(ends, ends[start] + most, side="right")) - 1, start + 1)
            yield self._part(start, stop, int(ends[start]), int(ends[stop]))
            start = stop

    def singles(self) -> Iterator[Block]:
        """Each document as a block of its own."""
        return self.cut(-1)

    def chosen(self, mask: npt.NDArray[np.bool_]) -> Block:
        """The documents that a mask [R] says, in their order."""
        if mask.all():
            return self
        keep = pa.array(mask)
        return Block(
            first=-1,
            ids=self.ids[np.repeat(mask, self.lengths)],
            lengths=self.lengths[mask],
            doc_ids=self.doc_ids.filter(keep),
            codes=self.codes[mask],
            targets=None if self.targets is None else self.targets.filter(keep),
        )

    def spans(self) -> list[npt.NDArray[np.int32] | None] | None:
        """The spans of each document as pairs [S, 2], as the shard writer takes them."""
        if self.targets is None:
            return None
        flat = (None if each is None else np.array(each, np.int32) for each in self.targets.to_pylist())
        return [None if each is None else each.reshape(-1, 2) for each in flat]

    def _part(self, start: int, stop: int, token: int, end: int) -> Block:
        return Block(
            first=self.first + start if self.first >= 0 else -1,
            ids=self.ids[token:end],
            lengths=self.lengths[start:stop],
            doc_ids=self.doc_ids.slice(start, stop - start),
            codes=self.codes[start:stop],
            targets=None if self.targets is None else self.targets.slice(start, stop - start),
        )


class Shelf:
    """Blocks that are all of a set, in order, from which documents are taken in any order."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = [block for block in blocks if len(block)]
        self._firsts = np.array([block.first for block in self._blocks], np.int64)
        self._ends = [np.concatenate((np.zeros(1, np.int64), np.cumsum(block.lengths))) for block in self._blocks]
        self._has_targets = any(block.targets is not None for block in self._blocks)

    def take(self, documents: Int64Array) -> Block:
        """These documents, at least one, by their numbers in the set, in this order."""
        where = np.searchsorted(self._firsts, documents, side="right") - 1
        rows = documents - self._firsts[where]
        order = np.argsort(where, kind="stable")
        held = [(self._blocks[n], rows[order[where[order] == n]]) for n in np.unique(where).tolist()]
        back = pa.array(np.argsort(order, kind="stable"))
        targets = [_targets(block, chosen) for block, chosen in held] if self._has_targets else None
        pieces = [
            self._blocks[n].ids[self._ends[n][row] : self._ends[n][row + 1]]
            for n, row in zip(where.tolist(), rows.tolist(), strict=True)
        ]
        return Block(
            first=-1,
            ids=np.concatenate(pieces),
            lengths=np.array([len(piece) for piece in pieces], np.int64),
            doc_ids=pa.concat_arrays([block.doc_ids.take(pa.array(chosen)) for block, chosen in held]).take(back),
            codes=np.concatenate([block.codes[chosen] for block, chosen in held])[back.to_numpy()],
            targets=None if targets is None else pa.concat_arrays(targets).take(back),
        )


def add_block(writer: ShardWriter, block: Block, sources: Sequence[str]) -> None:
    """Give the documents of a block to a shard writer. sources: names of the set's. Raises as `ShardWriter.add`."""
    writer.add(
        block.ids,
        lengths=block.lengths,
        doc_ids=block.doc_ids.to_pylist(),
        sources=[sources[code] for code in block.codes.tolist()],
        targets=block.spans(),
    )


def _targets(block: Block, rows: Int64Array) -> Any:
    if block.targets is None:
        return pa.nulls(len(rows), SPAN_TYPE)
    return block.targets.take(pa.array(rows))
