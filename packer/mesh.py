"""The planner: a global batch of documents in, a balanced `StepPlan` for every rank out.

Pure and deterministic: each machine's loader plans for itself and all come to the same plan. A document over the
capacity gets the smallest ring that holds it; rings come first, the widest on the least loaded ranks, then the rest by
cost, longest first. Rings and whole documents share micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from seqmesh.packer.balance import spread
from seqmesh.packer.best_fit import best_fit
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array, as_lengths
from seqmesh.packer.makespan import lower_bound, makespan
from seqmesh.packer.pieces import piece_tokens, smallest_rings
from seqmesh.packer.plan import Mode, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`ranks` model replicas, each holding at most `capacity` tokens in one micro-batch.

    mode `free`: ranks may differ in their number of micro-batches. mode `waves`: all have as many as the one with the
    most, for engines that need equal counts.
    """

    ranks: int
    capacity: int
    mode: Mode = "free"

    def __post_init__(self) -> None:
        for name in ("ranks", "capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}: must be one of {', '.join(get_args(Mode))}")


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Columns of a plan in the making: one row per piece."""

    document: Int64Array
    index: Int64Array
    ring_size: Int64Array
    tokens: Int64Array
    costs: Int64Array
    rank: Int64Array  # filled by the planner, as is `wave`
    wave: Int64Array


def plan_step(
    lengths: npt.ArrayLike, mesh: Mesh, cost: CostModel, *, supervised: npt.ArrayLike | None = None
) -> StepPlan:
    """Plan one step.

    supervised [D]: supervised tokens of each document; by default all but its last token. Raises ValueError for bad
    lengths or for a document that no ring of the mesh holds, naming it.
    """
    checked = as_lengths(lengths)
    learned = np.maximum(checked - 1, 0) if supervised is None else as_lengths(supervised, name="supervised")
    bound = lower_bound(checked, mesh.ranks, cost)  # refuses costs that do not fit 62 bits
    rings = smallest_rings(checked, mesh.capacity)
    if len(rings) and int(rings.max()) > mesh.ranks:
        worst = int(rings.argmax())
        raise ValueError(
            f"document {worst} has {int(checked[worst])} tokens: needs a ring of {int(rings[worst])} ranks of "
            f"{mesh.capacity} tokens, there are {mesh.ranks}"
        )
    pieces = _cut(checked, rings, cost)
    waves = _place(pieces, mesh)
    return _finish(pieces, waves, mesh, checked, rings, supervised_tokens=int(learned.sum()), bound=bound)


def _cut(lengths: Int64Array, rings: Int64Array, cost: CostModel) -> _Pieces:
    """All pieces of all documents, those of one document in a row."""
    document = np.repeat(np.arange(len(lengths)), rings)
    index = np.arange(len(document)) - np.repeat(np.cumsum(rings) - rings, rings)
    whole, ring_size = lengths[document], rings[document]
    return _Pieces(
        document=document,
        index=index,
        ring_size=ring_size,
        tokens=piece_tokens(whole, ring_size, index),
        costs=cost.of_pieces(whole, ring_size, index),
        rank=np.full(len(document), -1, np.int64),
        wave=np.full(len(document), -1, np.int64),
    )


def _place(pieces: _Pieces, mesh: Mesh) -> Int64Array:
    """Give every piece a rank and a wave; returns the number of waves of each rank."""
    loads = np.zeros(mesh.ranks, np.int64)
    rooms: list[list[int]] = [[] for _ in range(mesh.ranks)]
    _place_rings(pieces, mesh, loads, rooms)
    local = np.flatnonzero(pieces.ring_size == 1)
    pieces.rank[local], _ = spread(pieces.costs[local], loads)
    by_rank = local[np.argsort(pieces.rank[local], kind="stable")]
    bounds = np.searchsorted(pieces.rank[by_rank], np.arange(mesh.ranks + 1))
    waves = np.zeros(mesh.ranks, np.int64)
    for rank in range(mesh.ranks):
        mine = by_rank[bounds[rank] : bounds[rank + 1]]
        opened = np.array(rooms[rank], np.int64)
        bins, count = best_fit(pieces.tokens[mine], mesh.capacity, opened)
        pieces.wave[mine] = _dearest_first(bins, pieces.costs[mine], count, len(opened))
        waves[rank] = _in_use(pieces.wave[mine], opened, mesh.capacity)
    return waves if mesh.mode == "free" else np.full(mesh.ranks, waves.max(initial=0))


def _place_rings(pieces: _Pieces, mesh: Mesh, loads: Int64Array, rooms: list[list[int]]) -> None:
    """Rings, the widest and then the dearest first, each on the least loaded ranks, in the first wave that has room on
    all of them. Adds to `loads`, and leaves in `rooms[rank]` what each of its waves has left."""
    first = np.flatnonzero((pieces.ring_size > 1) & (pieces.index == 0))
    order = np.lexsort((first, -pieces.costs[first], -pieces.ring_size[first]))
    for start in first[order]:
        rows = np.arange(start, start + pieces.ring_size[start])
        members = np.sort(np.argsort(loads, kind="stable")[: len(rows)])
        tokens = pieces.tokens[rows].tolist()
        wave = _first_wave_with_room([rooms[member] for member in members], tokens)
        for member, needed in zip(members.tolist(), tokens, strict=True):
            rooms[member] += [mesh.capacity] * (wave + 1 - len(rooms[member]))
            rooms[member][wave] -= needed
        loads[members] += pieces.costs[rows]
        pieces.rank[rows] = members
        pieces.wave[rows] = wave


def _first_wave_with_room(rooms: list[list[int]], tokens: list[int]) -> int:
    """The first wave in which every member has room for its piece; a wave that a member has not opened has all."""
    wave = 0
    while any(wave < len(room) and room[wave] < needed for room, needed in zip(rooms, tokens, strict=True)):
        wave += 1
    return wave


def _dearest_first(bins: Int64Array, costs: Int64Array, count: int, opened: int) -> Int64Array:
    """Renumber the bins without rings from the dearest to the cheapest, so that in one wave all ranks have the like."""
    loads = np.zeros(count, np.int64)
    np.add.at(loads, bins, costs)
    renumbered = np.arange(count)
    renumbered[opened + np.argsort(-loads[opened:], kind="stable")] = np.arange(opened, count)
    return renumbered[bins]


def _in_use(waves: Int64Array, opened: Int64Array, capacity: int) -> int:
    """One more than the last wave that holds something."""
    rings = np.flatnonzero(opened < capacity)
    return max(int(waves.max(initial=-1)), int(rings.max(initial=-1))) + 1


def _finish(
    pieces: _Pieces,
    waves: Int64Array,
    mesh: Mesh,
    lengths: Int64Array,
    rings: Int64Array,
    *,
    supervised_tokens: int,
    bound: int,
) -> StepPlan:
    order = np.lexsort((pieces.document, pieces.ring_size == 1, pieces.wave, pieces.rank))
    columns = {
        "rank": pieces.rank[order],
        "wave": pieces.wave[order],
        "document": pieces.document[order],
        "ring_size": pieces.ring_size[order],
        "costs": pieces.costs[order],
    }
    return StepPlan(
        mode=mesh.mode,
        lengths=lengths,
        ring_index=pieces.index[order],
        ring_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(rings)]),
        ring_ranks=pieces.rank,
        waves=waves,
        supervised_tokens=supervised_tokens,
        makespan=makespan(ranks=mesh.ranks, barrier=mesh.mode == "waves", **columns),
        lower_bound=bound,
        **columns,
    )
