"""Waves of power-of-two groups, as Megatron-Core's development branch schedules dynamic context parallelism.

In: lengths, a mesh. Out: an `Assignment`. Every rank has one micro-batch in every wave, its pack. A wave is filled from
what is left, the longest document first, on the smallest group that holds it. Each other document has a choice of all
group sizes that hold it: to join a group of that size that has room for its tokens, or to open one on free ranks.
It goes where the largest work of any group grows least; where it goes nowhere it is left for a later wave. No group may
have more than 1.05 times the work of a rank that is full of the longest document. Ranks that stay free are used up by
doubling the smallest group. Work is s² / cp, whatever the cost model of the simulation.

Where the description is silent: of equal choices the smallest size, then the least work, then the oldest group is
taken; the smallest group with the most work is doubled first; on ranks that are not a power of two, or with a document
whose power of two is more than there are, what is left stays free, or the document gets all ranks. Groups are aligned
blocks, the largest first. A group has room while the largest pieces of its documents are within the capacity: unlike
sums of s / cp, that keeps to the capacity exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from seqmesh.benchmarks.baselines.placement import Placement
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import smallest_rings
from seqmesh.packer.plan import Assignment, Mesh

MOST_WORK = 1.05


@dataclass(slots=True)
class Group:
    """size: ranks. tokens: of the largest pieces. work: s² / size, summed."""

    size: int
    documents: list[int] = field(default_factory=list)
    tokens: int = 0
    work: float = 0.0

    def add(self, document: int, length: int) -> None:
        self.documents.append(document)
        self.tokens += largest_piece(length, self.size)
        self.work += length * length / self.size


def wave_scheduler(lengths: Int64Array, mesh: Mesh) -> Assignment:
    placement, wave = Placement(), 0
    least = power_of_two_rings(lengths, mesh)
    left = np.lexsort((np.arange(len(lengths)), -lengths)).tolist()
    while left:
        groups, left = fill_wave(left, lengths, least, mesh)
        use_free_ranks(groups, mesh.ranks)
        rank = 0
        for group in sorted(groups, key=lambda group: -group.size):
            placement.put(group.documents, range(rank, rank + group.size), wave)
            rank += group.size
        wave += 1
    return placement.assignment()


def power_of_two_rings(lengths: Int64Array, mesh: Mesh) -> Int64Array:
    """The smallest power of two that holds each document, or all ranks."""
    rings = 2 ** np.ceil(np.log2(smallest_rings(lengths, mesh.capacity))).astype(np.int64)
    return np.minimum(rings, mesh.ranks)


def largest_piece(length: int, size: int) -> int:
    """An upper bound of the tokens of a piece: two chunks, both rounded up."""
    return length if size == 1 else 2 * -(-length // (2 * size))


def fill_wave(
    documents: list[int], lengths: Int64Array, least: Int64Array, mesh: Mesh
) -> tuple[list[Group], list[int]]:
    """The groups of a wave, and what is left."""
    groups: list[Group] = []
    left: list[int] = []
    most = MOST_WORK * int(lengths[documents[0]]) * mesh.capacity
    for document in documents:
        length = int(lengths[document])
        group = best_group(groups, length, int(least[document]), mesh, most if groups else np.inf)
        if group is None:
            left.append(document)
            continue
        if not group.documents:
            groups.append(group)
        group.add(document, length)
    return groups, left


def best_group(groups: list[Group], length: int, least: int, mesh: Mesh, most: float) -> Group | None:
    """The group that a document joins or opens, None where no size has room."""
    free = mesh.ranks - sum(group.size for group in groups)
    sizes = {least << shift for shift in range(mesh.ranks.bit_length()) if least << shift <= mesh.ranks}
    choices = [group for group in groups if group.size in sizes]
    choices += [Group(size) for size in sorted(sizes) if size <= free and (groups or size == least)]
    highest = max((group.work for group in groups), default=0.0)

    def becomes(group: Group) -> tuple[float, int, float]:
        work = group.work + length * length / group.size
        return max(highest, work), group.size, work

    able = [group for group in choices if becomes(group)[2] <= most and has_room(group, length, mesh.capacity)]
    return min(able, key=becomes, default=None)


def has_room(group: Group, length: int, capacity: int) -> bool:
    """A new group has, as its size is chosen for that."""
    return not group.documents or group.tokens + largest_piece(length, group.size) <= capacity


def use_free_ranks(groups: list[Group], ranks: int) -> None:
    """Double the smallest group, of equal ones that with the most work, while ranks are free."""
    free = ranks - sum(group.size for group in groups)
    while free:
        smallest = min(groups, key=lambda group: (group.size, -group.work))
        if smallest.size > free:
            return
        free -= smallest.size
        smallest.size *= 2
        smallest.work /= 2
