from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seqmesh.tools.columns import array_of, lists, numbers, strings


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_numbers_are_the_arrays_and_come_back(dtype: str, size: int) -> None:
    values = np.arange(2 * size, dtype=dtype)[::2]
    column = numbers(values)
    column.validate(full=True)
    assert column.equals(pa.array(values))
    assert array_of(column).dtype == values.dtype
    assert array_of(column).tolist() == values.tolist()


def test_lists_hold_all_values_in_order() -> None:
    column: Any = lists(np.arange(5, dtype=np.uint16), np.array([2, 0, 3]))
    column.validate(full=True)
    assert column.equals(pa.array([[0, 1], [], [2, 3, 4]], pa.large_list(pa.uint16())))
    assert lists(np.zeros(0, np.uint16), np.zeros(0, np.int64)).to_pylist() == []


@pytest.mark.parametrize("texts", [[], ["", ""], ["a", "", "é", "日本\x00", "👩‍👩"]])
def test_strings_are_large_strings(texts: list[str]) -> None:
    column: Any = strings(texts)
    column.validate(full=True)
    assert column.equals(pa.array(texts, pa.large_string()))
