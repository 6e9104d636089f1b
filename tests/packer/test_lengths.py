import numpy as np
import pytest

from seqmesh.packer.lengths import as_lengths


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_any_integer_dtype_is_widened(dtype: str) -> None:
    widened = as_lengths(np.array([3, 0, 127], dtype))
    assert widened.dtype == np.int64
    assert widened.tolist() == [3, 0, 127]


def test_strided_input_comes_out_contiguous() -> None:
    widened = as_lengths(np.arange(10)[::3])
    assert widened.flags.c_contiguous
    assert widened.tolist() == [0, 3, 6, 9]


def test_empty_input_is_an_empty_array() -> None:
    assert as_lengths([]).shape == (0,)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1.0, 2.0], r"lengths has dtype float64: must be integers"),
        (["3"], r"must be integers"),
        ([True], r"must be integers"),
        ([[1, 2]], r"2 dimensions: must have one"),
        (5, r"0 dimensions: must have one"),
        ([4, 2, -1, -7], r"lengths\[2\] is -1: must be at least 0"),
        (np.array([1, 2**63], np.uint64), r"lengths\[1\] is 9223372036854775808: does not fit"),
    ],
)
def test_bad_lengths_are_refused_and_named(bad: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_lengths(bad)  # type: ignore[arg-type]  # wrong on purpose


def test_minimum_is_the_callers() -> None:
    with pytest.raises(ValueError, match=r"rows\[1\] is 0: must be at least 1"):
        as_lengths([1, 0], name="rows", minimum=1)
