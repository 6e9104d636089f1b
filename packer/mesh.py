"""The planner: a global batch of documents in, a balanced `StepPlan` for every rank out.

Pure and deterministic: each machine's loader plans for itself and all come to the same plan. This version places
documents that fit one rank (rings of one), in `free` mode: ranks may differ in their number of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from seqmesh.packer.balance import partition
from seqmesh.packer.bins import pack
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array, as_lengths
from seqmesh.packer.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`ranks` model replicas, each holding at most `capacity` tokens in one micro-batch."""

    ranks: int
    capacity: int
    mode: Literal["free"] = "free"

    def __post_init__(self) -> None:
        for name in ("ranks", "capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.mode != "free":
            raise ValueError(f"mode is {self.mode!r}: this version plans 'free'")


def plan_step(
    lengths: npt.ArrayLike, mesh: Mesh, cost: CostModel, *, supervised: npt.ArrayLike | None = None
) -> StepPlan:
    """Plan one step: costs are balanced over ranks, then each rank's documents are packed into micro-batches.

    supervised [D]: supervised tokens of each document; by default all but its last token. Raises ValueError for bad
    lengths or for a document that is longer than the capacity, naming it.
    """
    checked = as_lengths(lengths)
    if len(checked) and int(checked.max()) > mesh.capacity:
        longest = int(checked.argmax())
        raise ValueError(f"document {longest} has {int(checked[longest])} tokens: one rank holds {mesh.capacity}")
    learned = np.maximum(checked - 1, 0) if supervised is None else as_lengths(supervised, name="supervised")
    shares = partition(cost.of(checked), mesh.ranks)
    wave_of, waves = _pack_ranks(checked, shares.part_of, mesh)
    order = np.lexsort((np.arange(len(checked)), wave_of, shares.part_of)).astype(np.int64)
    return StepPlan(
        lengths=checked,
        document=order,
        rank=shares.part_of[order],
        wave=wave_of[order],
        ring_size=np.ones(len(order), np.int64),
        ring_index=np.zeros(len(order), np.int64),
        ring_offsets=np.arange(len(order) + 1, dtype=np.int64),
        ring_ranks=shares.part_of,
        waves=waves,
        cost=shares.loads,
        supervised_tokens=int(learned.sum()),
        makespan=int(shares.loads.max()),
        lower_bound=shares.lower_bound,
    )


def _pack_ranks(lengths: Int64Array, rank_of: Int64Array, mesh: Mesh) -> tuple[Int64Array, Int64Array]:
    """Micro-batch of each document on its rank, and the number of micro-batches of each rank."""
    by_rank = np.argsort(rank_of, kind="stable")
    bounds = np.searchsorted(rank_of[by_rank], np.arange(mesh.ranks + 1))
    wave_of = np.empty(len(lengths), np.int64)
    waves = np.zeros(mesh.ranks, np.int64)
    for rank in range(mesh.ranks):
        mine = by_rank[bounds[rank] : bounds[rank + 1]]
        bins = pack(lengths[mine], mesh.capacity)
        wave_of[mine] = bins.bin_of
        waves[rank] = bins.count
    return wave_of, waves
