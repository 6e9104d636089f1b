"""The order of an epoch in the plain meaning of the settings, by lists. What tests of streams compare with."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from seqmesh.loader.settings import Blocks
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.permute import mix64, permutation, shuffle_key

T = TypeVar("T")
SHUFFLES = (True, False, Blocks(window=1), Blocks(window=2), Blocks(window=100))


def some_parts(documents: int) -> Int64Array:
    """Bounds of parts of a set: some small, some empty, one that holds half of everything."""
    sixth = documents // 6
    return np.array([0, 0, sixth // 2, sixth, sixth, 2 * sixth, 3 * sixth, documents, documents], np.int64)


def plain_order(
    documents: Sequence[int], part_first: Sequence[int], shuffle: bool | Blocks, seed: int, epoch: int
) -> list[int]:
    """Documents (ascending) of a source in the order of an epoch."""
    return [document for window in plain_windows(documents, part_first, shuffle, seed, epoch) for document in window]


def plain_windows(
    documents: Sequence[int], part_first: Sequence[int], shuffle: bool | Blocks, seed: int, epoch: int
) -> list[list[int]]:
    """The same in windows: of a shuffle by blocks; otherwise everything in one."""
    key = shuffle_key(seed, epoch)
    if not isinstance(shuffle, Blocks):
        return [shuffled(documents, key) if shuffle else list(documents)]
    held = [[document for document in documents if a <= document < b] for a, b in pairwise(part_first)]
    order = shuffled([part for part in held if part], key)
    windows, before, count = [], 0, -(-len(order) // shuffle.window)
    for n in range(count):
        parts = order[n * len(order) // count : (n + 1) * len(order) // count]
        together = [document for part in parts for document in part]
        windows.append(shuffled(together, mix64(key ^ before)))
        before += len(together)
    return windows


def shuffled(items: Sequence[T], key: int) -> list[T]:
    return [items[place] for place in permutation(len(items), key).tolist()]
