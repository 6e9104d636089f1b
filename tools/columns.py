"""Arrow columns of numpy arrays and of strings, and back, by their buffers. No nulls here.

`pyarrow.array` and `to_numpy` would first look whether there is something of pandas about; where that is installed,
importing it takes longer than writing a small set does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def numbers(values: npt.NDArray[np.integer[Any]]) -> pa.Array[Any]:
    """A column of integers, which shares the array's memory."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, _buffer(values)])


def lists(values: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.int64]) -> pa.Array[Any]:
    """A column of lists, `lengths` of each, whose items are all `values` one after the other."""
    offsets: Any = numbers(_offsets(lengths))
    return pa.LargeListArray.from_arrays(offsets, numbers(values))


def strings(texts: Sequence[str]) -> pa.Array[Any]:
    """A column of large strings."""
    encoded = [text.encode() for text in texts]
    offsets = _offsets(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    return pa.Array.from_buffers(
        pa.large_string(), len(texts), [None, _buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )


def array_of(column: Any) -> npt.NDArray[Any]:
    """A column of integers as an array that shares its memory, and can not be written."""
    return np.from_dlpack(column)


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _buffer(values: npt.NDArray[np.integer[Any]]) -> pa.Buffer:
    contiguous: Any = np.ascontiguousarray(values)
    return pa.py_buffer(contiguous)
