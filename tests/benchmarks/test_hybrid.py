"""The benchmark of plans: every candidate trains on all documents, sends what the formula says, and agrees."""

from pathlib import Path

import numpy as np
import pytest

from seqmesh.benchmarks.hybrid import CANDIDATES, FREE, PACKED, PER_STEP, STATIC, Answer, Case, Job, compare, plan_of
from seqmesh.benchmarks.hybrid_rank import measure
from seqmesh.benchmarks.shards import random_shards
from seqmesh.packer.cost import CostModel
from seqmesh.packer.pieces import rows_sent
from seqmesh.packer.plan import StepPlan
from seqmesh.trainer.parallel import Ranks
from tests.ranks import run_ranks

MODEL = {"vocab_size": 64, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1}
ROW_BYTES = 3 * 2 * 8 * 4 * MODEL["layers"]  # keys and values forward, backward, and their gradients, in float32
STEPS = ((40, 5, 9, 3, 60, 2), (7, 30, 8, 8))
CASE = Case(lengths="", ranks=2, capacity=32, tokens=119, steps=2)


def plans(candidate: str) -> list[StepPlan]:
    return [plan_of(candidate, np.array(lengths), 32, 64, 2, CostModel()) for lengths in STEPS]


def test_candidates_are_what_their_names_say() -> None:
    assert all((plan.ring_size == 2).all() for plan in plans(STATIC))
    assert [set(plan.ring_size.tolist()) for plan in plans(PER_STEP)] == [{2}, {1}]
    assert all((plan.ring_size == 1).all() for plan in plans(PACKED))
    assert [set(plan.ring_size.tolist()) for plan in plans(FREE)] == [{1, 2}, {1}]
    for candidate in CANDIDATES:
        assert [sorted(set(plan.document.tolist())) for plan in plans(candidate)] == [list(range(6)), list(range(4))]


def measured(ranks: Ranks, job: Job) -> Answer:
    return measure(job, ranks)


def test_all_train_alike_and_send_what_the_formula_says(tmp_path: Path) -> None:
    random_shards(tmp_path / "set", np.concatenate([np.array(lengths) for lengths in STEPS]), vocab_size=64)
    job = Job(
        data=str(tmp_path / "set"),
        model=MODEL,
        capacity=32,
        longest=64,
        steps=STEPS,
        candidates=CANDIDATES,
        repeats=1,
    )
    found, _ = run_ranks(measured, 2, job)
    assert max(found.error.values()) < 1e-5
    for candidate in CANDIDATES:
        rows = sum(int(rows_sent(p.lengths, np.diff(p.ring_offsets)).sum()) for p in plans(candidate))
        assert found.sent[candidate] == rows * ROW_BYTES
    assert found.sent[PACKED] == 0 < found.sent[FREE] < found.sent[STATIC]
    results = compare(CASE, found)
    ratios = {each.figure: each.value for each in results.ratios}
    assert ratios["bytes_free_vs_static"] == pytest.approx(found.sent[FREE] / found.sent[STATIC])
    assert "bytes_free_vs_packed" not in ratios  # nothing to divide by
