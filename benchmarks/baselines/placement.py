"""What all baselines share: collecting where pieces go, and cutting a batch into rings and packs.

In: lengths, ring sizes, a capacity. Out: an `Assignment`, or items, which are dealt to ranks as a whole. Nothing is
decided here about which rank gets what. Plain Python and numpy, for reading; nothing is tuned for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from seqmesh.packer.bins import pack
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.plan import Assignment


@dataclass(frozen=True, slots=True)
class Item:
    """Documents that are one micro-batch on `width` ranks: one document on a ring, or a pack of whole ones on a
    rank."""

    documents: Int64Array
    width: int


@dataclass(slots=True)
class Placement:
    """Collects which ranks each document is on, in which wave."""

    documents: list[int] = field(default_factory=list)
    rings: list[Sequence[int]] = field(default_factory=list)
    waves: list[int] = field(default_factory=list)

    def put(self, documents: npt.ArrayLike, ranks: Sequence[int], wave: int) -> None:
        """Spread every one of these documents over the same ranks in a wave."""
        for document in np.asarray(documents).tolist():
            self.documents.append(document)
            self.rings.append(ranks)
            self.waves.append(wave)

    def assignment(self) -> Assignment:
        sizes = np.array([len(ring) for ring in self.rings], np.int64)
        rings = np.zeros(len(sizes), np.int64)
        rings[self.documents] = sizes
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        return Assignment(
            rings=rings,
            document=np.repeat(np.array(self.documents, np.int64), sizes),
            index=np.arange(len(first)) - first,
            rank=np.concatenate([np.zeros(0, np.int64), *(np.array(ring, np.int64) for ring in self.rings)]),
            wave=np.repeat(np.array(self.waves, np.int64), sizes),
        )


def items_of(lengths: Int64Array, rings: Int64Array, capacity: int) -> list[Item]:
    """A ring for each document that has one, packs of the rest, by best fit; in the order of their first documents.

    A document over the capacity whose ring is 1 (because its activations are offloaded) is alone.
    """
    alone = (rings > 1) | (lengths > capacity)
    items = [Item(np.array([document]), int(rings[document])) for document in np.flatnonzero(alone)]
    items += [Item(documents, 1) for documents in packs_of(lengths, np.flatnonzero(~alone), capacity)]
    return sorted(items, key=lambda item: int(item.documents[0]))


def packs_of(lengths: Int64Array, documents: Int64Array, capacity: int) -> list[Int64Array]:
    """These documents in packs of at most `capacity` tokens, by best-fit decreasing; ascending in each."""
    if not len(documents):
        return []
    bins = pack(lengths[documents], capacity)
    return [np.sort(documents[bins.pieces(index)]) for index in range(bins.count)]
