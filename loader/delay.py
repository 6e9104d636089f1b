"""Long documents are held back until there are several, so that they come together and can be balanced.

A document (or piece of one) at least as long as a threshold waits in the queue of its level. When a queue holds
`release` of them, these enter the global batch that is being drawn, or, where they have no room in it, begin the next;
the settings see to it that they fit. Meanwhile the batch goes on with others, but ends before so many more wait that
they would be due as well. At the end of an epoch the queues are emptied in the order of arrival: nothing is left out or
served twice. (WLB-LLM's outlier queues, OSDI 2025.)
"""

from __future__ import annotations

import numpy as np

from seqmesh.loader.cursor import add_row, documents_at, look, move_on
from seqmesh.loader.settings import Delay
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array

LEVEL, POSITION, OFFSET, DOCUMENT, LENGTH = range(5)  # columns of the queue, which is one table for all levels


def take_delayed(
    cursor: Int64Array,
    waiting: tuple[int, ...],
    lengths: Int64Array,
    size: int,
    documents: Int64Array,
    key: int,
    blocks: Int64Array,
    budget: int,
    longest: int,
    policy: int,
    delay: Delay,
) -> tuple[Int64Array, tuple[int, ...]]:
    """Rows (document, offset, length, 0) of the next global batch, and what waits after it; moves the cursor. size,
    documents, key, blocks: of the one source, see `cursor.document_at`. Raises ValueError where other places wait than
    these settings hold back."""
    thresholds = np.array(delay.thresholds, np.int64)
    queue = np.empty((max((len(thresholds) + 1) * delay.release, len(waiting) // 2), 5), np.int64)
    held = queue[: len(waiting) // 2]
    held[:, POSITION : OFFSET + 1] = np.array(waiting, np.int64).reshape(-1, 2)
    order = size, documents, key, blocks
    held[:, DOCUMENT] = documents_at(np.ascontiguousarray(held[:, POSITION]), *order)
    held[:, LENGTH] = np.minimum(lengths[held[:, DOCUMENT]] - held[:, OFFSET], longest)
    held[:, LEVEL] = np.searchsorted(thresholds, held[:, LENGTH], side="right") - 1
    if (held[:, LEVEL] < 0).any() or (np.bincount(held[:, LEVEL]) // delay.release).sum() > 1:
        raise ValueError(f"{len(held)} documents wait in the state: not as delay, {delay}, holds them back")
    rows, left = _take(cursor, queue, len(held), lengths, *order, budget, longest, policy, thresholds, delay.release)
    return rows, tuple(queue[:left, POSITION : OFFSET + 1].ravel().tolist())


@jit
def _take(
    cursor: Int64Array,
    queue: Int64Array,
    held: int,
    lengths: Int64Array,
    size: int,
    documents: Int64Array,
    key: int,
    blocks: Int64Array,
    budget: int,
    longest: int,
    policy: int,
    thresholds: Int64Array,
    release: int,
) -> tuple[Int64Array, int]:
    """The rows, and how many wait in the queue afterwards."""
    rows, count = np.empty((64, 4), np.int64), 0
    sizes = np.zeros(len(thresholds), np.int64)
    for level in queue[:held, LEVEL]:
        sizes[level] += 1
    while True:
        due = _first_due(sizes, release)
        if due >= 0 and queue[:held, LENGTH][queue[:held, LEVEL] == due][:release].sum() <= budget:
            rows, count, held, budget = _release(rows, count, queue, held, due, release, cursor, budget)
            sizes[due] -= release
            continue
        document, length = look(cursor, lengths, size, documents, key, blocks, longest, policy)
        if document < 0:
            if due < 0:
                rows, count, held, budget = _release(rows, count, queue, held, -1, held, cursor, budget)
            return rows[:count], held
        level = np.searchsorted(thresholds, length, side="right") - 1  # the last that it reaches
        if level < 0:
            if length > budget:
                return rows[:count], held
            rows, count = add_row(rows, count, document, cursor[1], length, 0)
            budget -= length
            cursor[2] += length
        elif due >= 0 and sizes[level] % release == release - 1:
            return rows[:count], held
        else:
            queue[held, 0], queue[held, 1], queue[held, 2] = level, cursor[0], cursor[1]
            queue[held, 3], queue[held, 4] = document, length
            sizes[level] += 1
            held += 1
        move_on(cursor, lengths[document], length, policy)


@jit
def _first_due(sizes: Int64Array, release: int) -> int:
    for level in range(len(sizes)):
        if sizes[level] >= release:
            return level
    return -1


@jit
def _release(
    rows: Int64Array, count: int, queue: Int64Array, held: int, level: int, most: int, cursor: Int64Array, budget: int
) -> tuple[Int64Array, int, int, int]:
    """Move the first `most` that wait on a level (−1: on any) to the rows, as far as the budget goes; the others keep
    their order."""
    kept = 0
    for each in range(held):
        length = queue[each, LENGTH]
        mine = level < 0 or queue[each, LEVEL] == level
        if mine and length > budget:
            most = 0
        if mine and most > 0:
            rows, count = add_row(rows, count, queue[each, DOCUMENT], queue[each, OFFSET], length, 0)
            budget -= length
            cursor[2] += length
            most -= 1
        else:
            queue[kept] = queue[each]
            kept += 1
    return rows, count, kept, budget
