"""Exact sums of int64 values, which refuse those that 62 bits do not hold."""

from __future__ import annotations

import numpy as np

from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import LARGEST, Int64Array


def total(values: Int64Array, name: str) -> int:
    """The exact sum of non-negative int64 values. Raises ValueError where 62 bits do not hold it.

    Two bits are kept free so that the sums of any two such totals are exact too.
    """
    return total_and_largest(values, name)[0]


def total_and_largest(values: Int64Array, name: str) -> tuple[int, int]:
    """The sum, as `total` gives it, and the largest value, 0 for none; the values are read once."""
    wrapped, largest = _wrapped_sum_and_largest(values)
    if largest * len(values) > LARGEST and float(values.sum(dtype=np.float64)) > LARGEST:
        raise ValueError(f"the sum of {name} is over 2**62: use a coarser unit")
    return wrapped, largest


@jit
def _wrapped_sum_and_largest(values: Int64Array) -> tuple[int, int]:
    wrapped, largest = 0, 0
    for value in values:
        wrapped += value
        largest = max(largest, value)
    return wrapped, largest
