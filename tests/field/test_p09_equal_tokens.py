"""Equal tokens, unequal work: attention grows with the square of a document, and ranks wait for each other."""

import numpy as np

from seqmesh.packer import CostModel, Mesh, partition, plan_step

LENGTHS = np.array([8192] + [1024] * 8)


def test_parts_of_equal_tokens_differ_eightfold_in_work_and_the_answer_says_so() -> None:
    by_tokens = partition(LENGTHS, 2)
    assert by_tokens.loads.tolist() == [8192, 8192]
    work = np.bincount(by_tokens.part_of, weights=LENGTHS**2)
    assert sorted(work) == [8_388_608, 67_108_864]
    by_work = partition(LENGTHS**2, 2)
    assert int(by_work.loads.max()) == by_work.lower_bound == 67_108_864  # the long one alone
    assert by_work.excess == 0.0


def test_a_document_over_both_ranks_evens_the_work() -> None:
    squares = CostModel(linear=0, quadratic=2)  # two pairs are about the square of a length
    plan = plan_step(LENGTHS, Mesh(ranks=2, capacity=8192), squares)
    assert plan.rings == 1
    assert abs(plan.makespan / 37_748_736 - 1) < 0.001
    whole = plan_step(LENGTHS, Mesh(ranks=2, capacity=8192), CostModel(linear=0, quadratic=2, row_near=10**9))
    assert whole.rings == 0
    assert abs(whole.makespan / 67_108_864 - 1) < 0.001
    assert whole.imbalance > 1.7  # and the plan says so
