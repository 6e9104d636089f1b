"""How heavy the heaviest part must be at least, whatever the partition: what says how good a partition is.

Takes costs sorted from the dearest to the cheapest; knows of equal counts but not of capacities. Cheap (two prefix sums
and a few vector operations), so it is a bound and not the optimum.
"""

from __future__ import annotations

import numpy as np

from seqmesh.packer.lengths import Int64Array


def heaviest_at_least(dearest_first: Int64Array, parts: int, fewest: int = 0) -> int:
    """No partition into `parts` of at least `fewest` items has a lighter heaviest part. Costs from the dearest down.

    The mean, and (pigeonhole, Graham 1969) of the j·parts + 1 dearest items some part has j + 1, which cost at least as
    much as the cheapest of them do. j = 0 is the dearest item. What that part lacks in items costs at least as much as
    the cheapest of all.
    """
    items = len(dearest_first)
    if items == 0:
        return 0
    below = np.zeros(items + 1, np.int64)  # below[i]: the i dearest
    np.cumsum(dearest_first, out=below[1:])
    j = np.arange((items - 1) // parts + 1)
    among = j * parts + 1
    missing = np.maximum(fewest - j - 1, 0)
    together = below[among] - below[among - j - 1] + below[items] - below[items - missing]
    return max(-(-int(below[items]) // parts), int(together.max()), _dearest_apart(below, parts, fewest))


def _dearest_apart(below: Int64Array, parts: int, fewest: int) -> int:
    """The t dearest items are in at most t parts, which are filled up to `fewest` items: the mean of those parts.

    In s < t parts the mean may be less, but as a function of s it falls and then rises, since cheap items come first:
    where t − 1 parts have no lower mean than t, no s has. Other t prove nothing and are left out.
    """
    if fewest == 0:
        return 0
    t = np.arange(1, parts + 1)
    dearest, everything = below[t], below[-1]
    apart = _mean_up(dearest + everything - below[len(below) - 1 - t * (fewest - 1)], t)
    filler = np.maximum((t[1:] - 1) * fewest - t[1:], 0)
    closer = _mean_up(dearest[1:] + everything - below[len(below) - 1 - filler], t[1:] - 1)
    proven = np.concatenate([[True], apart[1:] <= closer])
    return int(apart[proven].max())


def _mean_up(sums_of: Int64Array, count: Int64Array) -> Int64Array:
    return -(-sums_of // count)
