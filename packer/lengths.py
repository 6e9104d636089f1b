"""Document lengths: any integer array in, a checked int64 array out. The one place where bad lengths are refused.

Nothing here is compiled, so that what only checks lengths does without the compiler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

LARGEST = 1 << 62  # of any sum, so that two of them can be added


def as_lengths(lengths: npt.ArrayLike, *, name: str = "lengths", minimum: int = 0) -> Int64Array:
    """Widen `lengths` (any 1-D array or list of integers) to a contiguous int64 array that can be written.

    It is the given one where that is such an array already. Nobody writes to it, but numba would compile everything a
    second time for arrays that are read-only. Every later sum and product is done in 64 bits, whatever came in. Raises
    ValueError for anything that is not a one-dimensional list of integers of at least `minimum` that int64 can hold,
    naming the first bad index.
    """
    array = np.asarray(lengths)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions: must have one")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}: must be integers")
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name}[{int(array.argmax())}] is {int(array.max())}: does not fit 64 signed bits")
    widened = np.require(array, np.int64, ["C", "W"])
    if int(widened.min()) < minimum:
        bad = int(np.argmax(widened < minimum))
        raise ValueError(f"{name}[{bad}] is {int(widened[bad])}: must be at least {minimum}")
    return widened


def as_integer(name: str, value: Any, low: int, high: int = LARGEST) -> int:
    """`value` as a plain integer. Raises ValueError for one outside of low to high, and for what is no integer."""
    wrong_type = isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer)
    if not wrong_type and value < low and high == LARGEST:
        raise ValueError(f"{name} is {value}: must be at least {low}")
    if wrong_type or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}: must be an integer from {low} to {high}")
    return int(value)
