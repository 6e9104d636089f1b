"""A window of 3 means 3 keys, the row's own included, in every back end; some implementations count one more."""

from __future__ import annotations

import pytest

from seqmesh.kernels.backends import cpu, reference
from seqmesh.kernels.backends.base import Backend
from tests.kernels.backends.contract import Case, visible_keys


@pytest.mark.parametrize("backend", [reference.BACKEND, cpu.BACKEND], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (3, [1, 2, 3, 3, 1, 2, 3]),
        (1, [1] * 7),
        (4, [1, 2, 3, 4, 1, 2, 3]),
        (None, [1, 2, 3, 4, 1, 2, 3]),
    ],
)
def test_documents_of_four_and_three(backend: Backend, window: int | None, expected: list[int]) -> None:
    assert visible_keys(backend, Case(lengths=[4, 3], window=window, width=8)) == expected


@pytest.mark.parametrize("backend", [reference.BACKEND, cpu.BACKEND], ids=["reference", "cpu"])
def test_both_ways_without_causality(backend: Backend) -> None:
    assert visible_keys(backend, Case(lengths=[4, 3], window=2, causal=False)) == [2, 3, 3, 2, 2, 3, 2]
