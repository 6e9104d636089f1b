"""Below which number of bins no packing gets."""

from __future__ import annotations

import numpy as np

from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.rules import Rules


def fewest_bins(sizes: Int64Array, rules: Rules) -> int:
    """A lower bound on the bins of any packing that does not split: Martello and Toth's L2 (1990), the documents over
    their limit per bin, and the second resource over its capacity, whichever is most. O(N log N)."""
    if len(sizes) == 0:
        return 0
    by_count = -(-len(sizes) // rules.max_documents)
    by_extra = -(-int(rules.extra.sum()) // rules.extra_capacity) if len(rules.extra) else 0
    return max(martello_toth(sizes, rules.capacity), by_count, by_extra, 1)


def martello_toth(sizes: Int64Array, capacity: int) -> int:
    """L2 of Martello and Toth, "Knapsack Problems" (1990), chapter 8, for sizes from 0 to capacity.

    For any a ≤ capacity / 2: documents over capacity − a share their bin with none of at least a tokens; those over
    half the capacity share it with none of their like; what those from a to half the capacity have in excess of the
    room beside these needs bins of its own. The best a is one of the sizes, or 0.
    """
    ordered = np.sort(sizes)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(ordered)])
    upper_half = np.searchsorted(ordered, capacity // 2, side="right")
    least = np.concatenate([np.zeros(1, np.int64), ordered[:upper_half]])
    alone = np.searchsorted(ordered, capacity - least, side="right")
    first = np.searchsorted(ordered, least, side="left")
    in_half = alone - upper_half
    room_beside = in_half * capacity - (sums[alone] - sums[upper_half])
    excess = np.maximum(sums[upper_half] - sums[first] - room_beside, 0)
    return int((len(ordered) - alone + in_half - (-excess // capacity)).max())
