"""Squares and sums of 32-bit lengths that wrap, so that the dearest document looks free."""

import numpy as np
import pytest

from seqmesh.packer import CostModel, Mesh, partition, plan_step
from seqmesh.packer.cost import attended_pairs
from seqmesh.packer.lengths import as_lengths

LENGTHS = [65536, 46341, 1024]
SQUARES = [4294967296, 2147488281, 1048576]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_squares_are_exact_for_every_dtype(dtype: type) -> None:
    lengths = as_lengths(np.array(LENGTHS, dtype))
    assert (2 * attended_pairs(lengths) - lengths).tolist() == SQUARES


def test_the_longest_document_is_the_dearest() -> None:
    cost = CostModel(linear=1, quadratic=2, row_near=10**9)  # so that rings do not pay
    plan = plan_step(np.array(LENGTHS, np.int32), Mesh(ranks=3, capacity=65536), cost)
    assert plan.rank[plan.document == 0].tolist() == [0]  # the dearest goes first, to rank 0
    assert plan.cost.tolist() == [square + 2 * length for square, length in zip(SQUARES, LENGTHS, strict=True)]


def test_sums_over_a_whole_plan_are_exact() -> None:
    lengths = np.full(300, 65536, np.int32)
    plan = plan_step(lengths, Mesh(ranks=7, capacity=65536), CostModel(linear=1, quadratic=2))
    assert int(plan.cost.sum()) == 300 * (65536**2 + 2 * 65536)
    assert plan.tokens == 300 * 65536
    assert partition(np.full(300, 2**31 - 1, np.int32), 2).loads.tolist() == [150 * (2**31 - 1)] * 2
