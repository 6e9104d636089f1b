"""Mode `waves`: every rank runs the same number of micro-batches, and all wait for each other after each of them.

So the micro-batches of one wave should cost alike, and be full. Documents are taken from the longest to the shortest,
which puts like with like: each wave takes its share of the tokens that are left. In a wave rings come first, each on
the ranks with the least work that have room; whole documents follow, the dearest first, on the rank with the least
work; then rooms are filled up with shorter ones as long as no rank becomes the dearest; at last documents are exchanged
between ranks to even out the work. What has no room waits for the next wave.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqmesh.packer.cost import CostModel
from seqmesh.packer.exchange import refine
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import largest_pieces
from seqmesh.packer.plan import Assignment, Mesh
from seqmesh.packer.sorting import descending

SPARE_PLACES = 8  # for documents that come to a rank in exchange


class _Documents(NamedTuple):
    """All documents, the longest first: most tokens of a piece, width (ring size; 1: whole), wave (−1 as long as it has
    none); and all pieces, those of document d from offsets[d] to offsets[d + 1] − 1: cost and rank."""

    lengths: Int64Array
    tokens: Int64Array
    width: Int64Array
    wave: Int64Array
    offsets: Int64Array
    costs: Int64Array
    members: Int64Array


def place(lengths: Int64Array, sizes: Int64Array, mesh: Mesh, cost: CostModel, fullness: float) -> Assignment:
    """Rank and wave of every piece, for rings of these sizes [D].

    In as few waves as the tokens need if each is full to `fullness`, or in more where pieces do not fit together.
    """
    order = descending(lengths)
    documents = _documents(lengths[order], sizes[order], mesh, cost)
    left, number = int(lengths.sum()), 0
    planned = max(-(-left // max(int(mesh.ranks * mesh.capacity * fullness), 1)), 1)
    while (documents.wave < 0).any():
        waves_left = max(planned - number, 1)
        left -= _fill_wave(documents, number, -(-left // waves_left), mesh, choosy=waves_left > 1)
        number += 1
    width, offsets = documents.width, documents.offsets
    return Assignment(
        rings=sizes,
        document=np.repeat(order, width),
        index=np.arange(offsets[-1]) - np.repeat(offsets[:-1], width),
        rank=documents.members,
        wave=np.repeat(documents.wave, width),
    )


def _documents(lengths: Int64Array, width: Int64Array, mesh: Mesh, cost: CostModel) -> _Documents:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(width)])
    index = np.arange(offsets[-1]) - np.repeat(offsets[:-1], width)
    whole, size = np.repeat(lengths, width), np.repeat(width, width)
    return _Documents(
        lengths=lengths,
        tokens=largest_pieces(lengths, width, mesh.capacity),
        width=width,
        wave=np.full(len(width), -1, np.int64),
        offsets=offsets,
        costs=cost.alone(whole, size, index, mesh.node),
        members=np.empty(offsets[-1], np.int64),
    )


def _fill_wave(documents: _Documents, number: int, share: int, mesh: Mesh, *, choosy: bool) -> int:
    """Choose and place about `share` tokens of documents for one wave; returns their tokens. choosy: rather leave some
    for later than make a rank the dearest with the last of them."""
    work, held = np.zeros((2, mesh.ranks), np.int64)
    taken = int(_place_rings(documents, number, share, mesh.node, mesh.capacity, work, held))
    ring_work, ring_held = work.copy(), held.copy()
    taken += int(_place_whole(documents, number, share - taken, mesh.capacity, work, held, choosy))
    whole = np.flatnonzero((documents.wave == number) & (documents.width == 1))
    pieces = documents.offsets[whole]
    rank_of = documents.members[pieces]
    refine(
        documents.costs[pieces],
        documents.tokens[whole],
        descending(documents.costs[pieces]),
        rank_of,
        np.bincount(rank_of, minlength=mesh.ranks) + SPARE_PLACES,
        fewest=0,
        capacity=mesh.capacity,
        bound=-(-int(work.sum()) // mesh.ranks),
        loads=ring_work,
        held=ring_held,
    )
    documents.members[pieces] = rank_of
    return taken


@jit
def _place_rings(
    documents: _Documents, number: int, share: int, per_node: int, capacity: int, work: Int64Array, held: Int64Array
) -> int:
    """Rings up to the wave's share of the tokens; returns their tokens."""
    lengths, tokens, width, wave, offsets, costs, members = documents
    taken = 0
    for document in range(len(width)):
        if wave[document] >= 0 or width[document] == 1 or (taken and taken + lengths[document] > share):
            continue
        mine = members[offsets[document] : offsets[document + 1]]
        if _choose(work, held, capacity - tokens[document], per_node, mine):
            for index in range(len(mine)):
                work[mine[index]] += costs[offsets[document] + index]
                held[mine[index]] += tokens[document]
            wave[document] = number
            taken += lengths[document]
    return taken


@jit
def _choose(work: Int64Array, held: Int64Array, most_held: int, per_node: int, mine: Int64Array) -> bool:
    """The ranks of a ring: those with the least work that hold at most so many tokens, of one node where it fits."""
    order = np.argsort(work, kind="mergesort")
    count, found = len(mine), 0
    inside = count <= per_node < len(work)
    node = _best_node(order, held, most_held, per_node, count) if inside else 0
    for rank in order:
        if held[rank] <= most_held and found < count and (not inside or rank // per_node == node):
            mine[found] = rank
            found += 1
    mine[:found].sort()
    return found == count


@jit
def _best_node(order: Int64Array, held: Int64Array, most_held: int, per_node: int, count: int) -> int:
    """The node of which `count` ranks with room come first in an order by work, or −1."""
    found = np.zeros(-(-len(order) // per_node), np.int64)
    for rank in order:
        if held[rank] <= most_held:
            node = rank // per_node
            found[node] += 1
            if found[node] == count:
                return int(node)
    return -1


@jit
def _place_whole(
    documents: _Documents, number: int, share: int, capacity: int, work: Int64Array, held: Int64Array, choosy: bool
) -> int:
    """Whole documents up to the share, then those that fit without making a rank the dearest; returns their tokens."""
    _lengths, tokens, width, wave, offsets, costs, members = documents
    taken, dearest = 0, work.max()
    for topping_up in (False, True):
        for document in range(len(width)):
            if wave[document] >= 0 or width[document] > 1 or (taken >= share and not topping_up):
                continue
            rank = _least_work(work, held, capacity - tokens[document])
            late = topping_up or (choosy and taken > share - share // 32)
            cost = costs[offsets[document]]
            if rank < 0 or (late and work[rank] + cost > dearest):
                continue
            work[rank] += cost
            held[rank] += tokens[document]
            dearest = max(dearest, work[rank])
            members[offsets[document]] = rank
            wave[document] = number
            taken += tokens[document]
    return taken


@jit
def _least_work(work: Int64Array, held: Int64Array, most_held: int) -> int:
    """The rank with the least work of those that hold at most so many tokens, or −1."""
    best = -1
    for rank in range(len(work)):
        if held[rank] <= most_held and (best < 0 or work[rank] < work[best]):
            best = rank
    return best
