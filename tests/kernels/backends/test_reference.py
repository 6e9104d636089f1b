"""The obvious back end, beyond the contract: the mask that all else is read from, and that it never refuses."""

from __future__ import annotations

import pytest
import torch

from seqmesh.kernels.backends import reference
from seqmesh.kernels.backends.base import Rule
from tests.kernels.backends.contract import Case, request


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window", "expected"),
    [
        (3, 3, True, None, ["100", "110", "111"]),
        (2, 4, True, None, ["1110", "1111"]),
        (4, 2, True, None, ["00", "00", "10", "11"]),
        (2, 4, True, 2, ["0110", "0011"]),
        (3, 3, False, None, ["111", "111", "111"]),
        (3, 3, False, 2, ["110", "111", "011"]),
        (4, 2, False, 2, ["00", "10", "11", "11"]),
        (3, 3, True, 1, ["100", "010", "001"]),
    ],
)
def test_who_sees_what(queries: int, keys: int, causal: bool, window: int | None, expected: list[str]) -> None:
    allowed = reference.visible(queries, keys, Rule(causal, window, 1.0))
    assert ["".join(str(int(seen)) for seen in row) for row in allowed] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_it_refuses_nothing(dtype: torch.dtype) -> None:
    case = Case(lengths=[3], heads=(6, 3), width=257, causal=False, window=3, dtype=dtype, device="meta")
    assert reference.BACKEND.refusal(request(case)) is None
