"""Micro-batches for pipelines: more of them, alike in time, in an order that keeps every stage busy.

A stage that gets micro-batches of unequal time waits for its neighbours, and the first one's way through the stages is
lost. So whole documents of a rank go into more micro-batches of about equal time; the smallest few may come before the
first ring, to fill the pipeline; the rings follow, in one of several orders; and the others, the dearest first, take
the numbers that rings leave out and go on after the last ring, so that a pipeline drains with the smallest. All members
of a ring still count it as the same micro-batch. What is best depends on stages, fixed cost and rings: `candidates`
gives variants, to be rated by the time that `pipeline.pipelined` finds. Ranks and ring sizes stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from seqmesh.packer.cost import CostModel
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.plan import Assignment, Mesh

RingOrder = Literal["placed", "ascending", "hill"]


class Variant(NamedTuple):
    """rings: the order of rings by time; `hill` is up and down again. finer: times as many micro-batches of whole
    documents. filled: whether small ones come before the first ring."""

    rings: RingOrder
    finer: int
    filled: bool


SHAPES: tuple[tuple[RingOrder, bool], ...] = (("placed", True), ("hill", False), ("ascending", False), ("hill", True))
VARIANTS = tuple(Variant(rings, finer, filled) for finer in (4, 2, 1) for rings, filled in SHAPES)


def candidates(
    assignment: Assignment, lengths: Int64Array, mesh: Mesh, cost: CostModel, stages: int
) -> Iterator[Assignment]:
    """Variants of an assignment, the most promising first, then the assignment as it is; just that for one stage."""
    costs = cost.of(lengths)
    for variant in VARIANTS if stages > 1 else ():
        yield relevel(assignment, lengths, costs, mesh, variant, filling=stages // 2)
    yield assignment


def relevel(
    assignment: Assignment, lengths: Int64Array, costs: Int64Array, mesh: Mesh, variant: Variant, *, filling: int
) -> Assignment:
    """One variant. costs [D]: of each document. filling: micro-batches before the first ring, at most half of those of
    whole documents."""
    document, rank, wave = assignment.document, assignment.rank, assignment.wave.copy()
    spread = assignment.rings[document] > 1
    members, ring_offsets = _rings(assignment, np.flatnonzero(spread), costs, variant.rings)
    whole = np.flatnonzero(~spread)
    whole = whole[np.lexsort((document[whole], -costs[document[whole]], rank[whole]))]
    offsets = np.searchsorted(rank[whole], np.arange(mesh.ranks + 1))
    parts = np.minimum(_batches(rank[whole], wave[whole], mesh.ranks) * variant.finer, np.diff(offsets))
    part_of = np.empty(len(whole), np.int64)
    _level(offsets, lengths[document[whole]], costs[document[whole]], mesh.capacity, parts, part_of)
    first = np.minimum(filling, parts // 2) if variant.filled else np.zeros_like(parts)
    ring_wave, whole_wave = np.empty(len(ring_offsets) - 1, np.int64), np.empty(len(whole), np.int64)
    _count_up(first, parts, ring_offsets, rank[members], offsets, part_of, ring_wave, whole_wave)
    wave[members] = np.repeat(ring_wave, np.diff(ring_offsets))
    wave[whole] = whole_wave
    return replace(assignment, wave=wave)


def _rings(
    assignment: Assignment, pieces: Int64Array, costs: Int64Array, order: RingOrder
) -> tuple[Int64Array, Int64Array]:
    """The pieces of rings, ring after ring in the order that is asked for, and where each ring begins among them."""
    document = assignment.document[pieces]
    each, first = np.unique(document, return_index=True)
    placed = np.lexsort((each, assignment.wave[pieces[first]]))
    times = costs[each[placed]] // assignment.rings[each[placed]]
    chosen = each[placed[_sorted(times, order)]]
    turn = np.zeros(len(assignment.rings), np.int64)
    turn[chosen] = np.arange(len(chosen))
    members = pieces[np.argsort(turn[document], kind="stable")]
    return members, np.concatenate([np.zeros(1, np.int64), np.cumsum(assignment.rings[chosen])])


def _sorted(times: Int64Array, order: RingOrder) -> Int64Array:
    if order == "placed":
        return np.arange(len(times))
    ascending = np.argsort(times, kind="stable")
    return ascending if order == "ascending" else np.concatenate([ascending[::2], ascending[1::2][::-1]])


def _batches(rank: Int64Array, wave: Int64Array, ranks: int) -> Int64Array:
    """Micro-batches of each rank."""
    span = int(wave.max(initial=0)) + 1
    return np.bincount(np.unique(rank * span + wave) // span, minlength=ranks).astype(np.int64, copy=False)


@jit
def _level(
    offsets: Int64Array, tokens: Int64Array, costs: Int64Array, capacity: int, parts: Int64Array, part_of: Int64Array
) -> None:
    """Fill which part each document goes to, parts by descending work; `parts` [ranks] grows where they lack room.

    Documents of rank r, the dearest first: offsets[r] to offsets[r + 1]. Each goes to the part with the least work that
    has room; one that is over the capacity by itself (offloaded) is alone.
    """
    for rank in range(len(parts)):
        documents = range(offsets[rank], offsets[rank + 1])
        work, held = np.zeros((2, len(documents)), np.int64)
        count = parts[rank]
        for document in documents:
            part = _least_with_room(work[:count], held[:count], capacity - tokens[document])
            if part < 0:
                part, count = count, count + 1
            work[part] += costs[document]
            held[part] += tokens[document]
            part_of[document] = part
        place = np.empty(count, np.int64)
        place[np.argsort(-work[:count], kind="mergesort")] = np.arange(count)
        for document in documents:
            part_of[document] = place[part_of[document]]
        parts[rank] = count


@jit
def _least_with_room(work: Int64Array, held: Int64Array, most_held: int) -> int:
    """The part with the least work of those that hold at most so many tokens, or nothing yet; or −1."""
    best = -1
    for part in range(len(work)):
        if (held[part] <= most_held or held[part] == 0) and (best < 0 or work[part] < work[best]):
            best = part
    return best


@jit
def _count_up(
    first: Int64Array,
    parts: Int64Array,
    ring_offsets: Int64Array,
    members: Int64Array,
    offsets: Int64Array,
    part_of: Int64Array,
    ring_wave: Int64Array,
    wave: Int64Array,
) -> None:
    """Fill the wave of each ring and of each whole document: the `first` [ranks] smallest parts, then the rings, each
    when its last member has come to it, and the other parts in what they leave out and after them."""
    following = first.copy()
    taken = np.zeros((len(first), len(ring_wave) + first.max() + 1), np.bool_)
    for ring in range(len(ring_wave)):
        mine = members[ring_offsets[ring] : ring_offsets[ring + 1]]
        ring_wave[ring] = following[mine].max()
        for rank in mine:
            following[rank] = ring_wave[ring] + 1
            taken[rank, ring_wave[ring]] = True
    for rank in range(len(first)):
        number_of = np.empty(parts[rank], np.int64)
        number = first[rank]
        for part in range(parts[rank]):
            while number < taken.shape[1] and taken[rank, number]:
                number += 1
            if part < parts[rank] - first[rank]:
                number_of[part] = number
                number += 1
            else:
                number_of[part] = parts[rank] - 1 - part
        for document in range(offsets[rank], offsets[rank + 1]):
            wave[document] = number_of[part_of[document]]
