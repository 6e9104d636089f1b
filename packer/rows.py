"""Rows for ordinary data-parallel trainers: a fixed number of packed rows per step, alike in cost.

A window of documents is packed, its rows are sorted by cost and cut into steps, so that the rows of one step, which
wait for each other, cost about the same; then the steps, and the rows inside each, are put into a drawn order, so that
neighbours in time are not alike in length. Deterministic: the window's lengths, the options and the seed decide
everything, and step s of the window is found in O(1). It does not read documents, and does not know ranks: each takes
its share of a step's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.packer.bins import Bins, pack
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array, as_integer, as_lengths
from seqmesh.packer.permute import mix64, permutation, shuffle_key

LARGEST_WINDOW = 1_000_000  # documents: the plan of a window is computed anew when a job resumes inside it
EMPTY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The steps of one window. row_at [steps, rows_per_step]: the bin that each row of each step is, or −1 for a row
    without documents. costs [bins.count]: summed cost of each bin."""

    bins: Bins
    costs: Int64Array
    row_at: npt.NDArray[np.int64]

    @property
    def steps(self) -> int:
        return len(self.row_at)

    def pieces(self, step: int, row: int) -> Int64Array:
        """The pieces (see `Bins`) of one row of one step."""
        chosen = int(self.row_at[step, row])
        return np.zeros(0, np.int64) if chosen == EMPTY else self.bins.pieces(chosen)

    @property
    def imbalance(self) -> float:
        """Time of all steps if each waits for its dearest row, over that of perfectly even steps."""
        by_row = np.append(self.costs, 0)[self.row_at].astype(np.float64)
        total = float(by_row.sum())
        return float(by_row.max(axis=1).sum()) * self.row_at.shape[1] / total if total else 1.0


def plan_rows(
    lengths: npt.ArrayLike,
    capacity: int,
    rows_per_step: int,
    *,
    cost: CostModel | None = None,
    seed: int = 0,
    epoch: int = 0,
    window: int = 0,
    **options: Any,
) -> Rows:
    """Pack one window of at most a million documents and order its rows.

    cost: what rows are alike in; tokens by default. window: its number in the epoch, for an order of its own. options:
    those of `pack`, without `seed`, `epoch` and `bins_multiple`. The number of rows is a multiple of `rows_per_step`:
    rows with several documents are shared out; only where there are fewer documents than rows are some rows empty.
    Raises ValueError for a larger window, for fewer than one row per step, and as `pack` does.
    """
    documents = as_lengths(lengths)
    if len(documents) > LARGEST_WINDOW:
        raise ValueError(f"the window has {len(documents)} documents: cut it into windows of at most {LARGEST_WINDOW}")
    as_integer("rows_per_step", rows_per_step, 1)
    bins = _pack_to_steps(documents, capacity, rows_per_step, seed=seed, epoch=epoch, **options)
    costs = _costs_of_bins(bins, cost or CostModel())
    key = mix64(shuffle_key(seed, epoch) ^ window)
    return Rows(bins=bins, costs=costs, row_at=_order(costs, rows_per_step, key))


def _pack_to_steps(documents: Int64Array, capacity: int, rows_per_step: int, **options: Any) -> Bins:
    bins = pack(documents, capacity, **options)
    target = -(-bins.count // rows_per_step) * rows_per_step
    packed = int((bins.bin_of >= 0).sum())
    if bins.count == target or packed < target:
        return bins
    return pack(documents, capacity, bins_multiple=rows_per_step, **options)


def _costs_of_bins(bins: Bins, cost: CostModel) -> Int64Array:
    if not bins.count:
        return np.zeros(0, np.int64)
    costs = cost.of(bins.lengths)[bins.order]
    return np.asarray(np.add.reduceat(costs, bins.offsets[:-1]), np.int64)


def _order(costs: Int64Array, rows_per_step: int, key: int) -> npt.NDArray[np.int64]:
    """Rows of like cost side by side, then the steps and the rows in each of them in a drawn order."""
    steps = -(-len(costs) // rows_per_step)
    rows = np.full(steps * rows_per_step, EMPTY, np.int64)
    rows[: len(costs)] = np.argsort(-costs, kind="stable")
    drawn = permutation(len(rows), mix64(key)).reshape(steps, rows_per_step)
    inside = np.take_along_axis(rows.reshape(steps, rows_per_step), np.argsort(drawn, axis=1), axis=1)
    return inside[permutation(steps, key)]
