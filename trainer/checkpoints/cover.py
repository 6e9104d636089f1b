"""Whether parts of a tensor make the whole of it, each element once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from seqmesh.trainer.checkpoints.index import Entry


def uncovered(entries: Sequence[Entry]) -> str:
    """What is wrong with the parts of a tensor; empty where they have each of its elements once."""
    name, shape = entries[0].name, entries[0].shape
    ends = [[begin + size for begin, size in zip(each.offsets, each.sizes, strict=True)] for each in entries]
    inside = (end <= size for each in ends for end, size in zip(each, shape, strict=True))
    if any(each.shape != shape for each in entries) or not all(inside):
        return f"{name}: the ranks have parts of tensors of several shapes, {list(shape)} one of them"
    # Between any two cuts, in every dimension, all elements are on the same processes.
    cuts = [
        sorted({0, size, *(each.offsets[dim] for each in entries), *(each[dim] for each in ends)})
        for dim, size in enumerate(shape)
    ]
    places = [{cut: place for place, cut in enumerate(each)} for each in cuts]
    holders = np.zeros([len(each) - 1 for each in cuts], np.int64)
    for entry, end in zip(entries, ends, strict=True):
        box = zip(places, entry.offsets, end, strict=True)
        holders[tuple(slice(place[low], place[high]) for place, low, high in box)] += 1
    if holders.max() > 1:
        return f"{name}: several ranks write the same elements"
    if holders.min() == 0:
        held = sum(math.prod(each.sizes) for each in entries)
        return f"{name}: the ranks have {held:,} of its {math.prod(shape):,} elements"
    return ""
