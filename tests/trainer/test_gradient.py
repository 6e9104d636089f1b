"""The gradient of a step is that of one process running document by document, whatever the plan, the ranks, and how the
model lies on them; and so are the weights after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.packer.pieces import rows_sent
from seqmesh.packer.plan import Mode
from seqmesh.tools.shard_writer import write_shards
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.replicas import Sharding
from tests.ranks import run_ranks
from tests.support import documents_of, settings_for
from tests.trainer.steps import (
    CONFIG,
    Job,
    Reference,
    Spans,
    Taken,
    plans_of,
    reference,
    relative_error,
    take_all,
)

SECONDS = 300.0  # for all jobs of a test: ranks may outnumber cores by far
ALONE = Ranks(0, 1, torch.device("cpu"))
MODES: tuple[Mode, ...] = get_args(Mode)
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
# Small enough to clip.
OPTIMIZERS = {name: OptimConfig(name=name, lr=0.05, clip=0.5) for name in ("adamw", "lamb")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Documents and settings. spans: what is supervised of each document; None: all."""

    lengths: Sequence[int]
    settings: dict[str, Any]
    spans: Sequence[Spans] | None = None


# Lengths that nothing divides, rings of 2 to 4, several in one wave and one after the other, short documents between.
RINGS = [53, 31, 23, 5, 37, 1, 2, 19, 41, 3, 7, 13, 29, 11, 17, 43]
COST = CostModel(linear=20, quadratic=2)
CASES = {
    # One long document outweighs all others: its rank runs one micro-batch, the others several.
    "uneven": Case(
        lengths=[60, *[7] * 24, 3, 1, 2],
        settings={"capacity": 60, "tokens_per_step": 180, "cost": CostModel(quadratic=8)},
    ),
    # Fewer documents than ranks: somebody has none.
    "empty_rank": Case(lengths=[20, 9], settings={"capacity": 20, "tokens_per_step": 20}),
    # A rank has tokens but nothing to learn, and others have nothing; then nobody has anything to learn.
    "unsupervised": Case(
        lengths=[20] * 4, spans=[[(3, 9)], [], [], []], settings={"capacity": 20, "tokens_per_step": 40}
    ),
}
# (ranks, capacity) -> the widest ring
WIDEST = {(2, 28): 2, (3, 20): 3, (4, 15): 4}


def ring_case(capacity: int, **changes: Any) -> Case:
    settings = {"capacity": capacity, "max_document": 53, "tokens_per_step": 160, "cost": COST}
    return Case(lengths=RINGS, settings=settings | changes)


def cases_for(count: int) -> dict[str, Case]:
    rings = {f"rings_{capacity}": ring_case(capacity) for ranks, capacity in WIDEST if ranks == count}
    if count == 2:  # rings, documents that are whole, and ranks without any, filled up with rows of no document
        rings["padded"] = ring_case(28, pad_to=28)
    left_out = {1: ("empty_rank",), 3: ("empty_rank",), 4: ("empty_rank", "uneven")}.get(count, ())
    return {name: case for name, case in CASES.items() if name not in left_out} | rings


def settings_of(case: Case, folder: Path, count: int, mode: Mode) -> LoaderSettings:
    if not folder.exists():
        folder.mkdir()
        documents = documents_of(case.lengths, vocab=CONFIG.vocab_size)
        write_shards(folder, documents, vocab_size=CONFIG.vocab_size, shard_tokens=200, targets=case.spans)
    return settings_for(folder, ranks=count, shuffle=False, epochs=None, mode=mode, **case.settings)


def run_jobs(count: int, jobs: Sequence[Job]) -> list[list[Taken]]:
    """What every rank has after every job: [job][rank]."""
    by_rank = run_ranks(take_all, count, jobs, seconds=SECONDS) if count > 1 else [take_all(ALONE, jobs)]
    return [list(each) for each in zip(*by_rank, strict=True)]


def check_process(taken: Taken, expected: Reference, optim: OptimConfig) -> None:
    """Its gradients, norms and weights are those of one process; and it made no group."""
    for result, found, wanted in zip(taken.results, taken.gradients, expected.gradients, strict=True):
        if not np.any(wanted):
            assert not np.any(found)
            assert not result.updated
            continue
        assert result.updated
        assert relative_error(found, wanted) <= 1e-9
        assert result.grad_norm == pytest.approx(float(np.linalg.norm(wanted)), rel=1e-12)
        assert optim.clip is None or result.grad_norm > optim.clip
    assert relative_error(taken.weights, expected.weights) <= 1e-9
    assert taken.groups == 0


def check_steps(taken: Sequence[Taken], expected: Reference, optim: OptimConfig) -> None:
    for rank in taken:
        check_process(rank, expected, optim)
    for same in zip(*(rank.gradients for rank in taken), strict=True):
        assert len({gradient.tobytes() for gradient in same}) == 1
    assert len({rank.own for rank in taken}) == 1
    assert len({rank.weights.tobytes() for rank in taken}) == 1
    assert len({tuple(result.grad_norm for result in rank.results) for rank in taken}) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_mode_and_sharding_takes_the_steps_of_one_process(tmp_path: Path, count: int) -> None:
    check_cases(tmp_path, cases_for(count), count)


def check_cases(folder: Path, cases: dict[str, Case], count: int) -> None:
    """Every case in every mode and sharding, with AdamW and LAMB in turn."""
    shardings = SHARDINGS if count > 1 else SHARDINGS[:1]
    names, jobs = [], []
    for (c, name), (m, mode), (s, sharding) in product(enumerate(cases), enumerate(MODES), enumerate(shardings)):
        names.append(name)
        optim = list(OPTIMIZERS.values())[(c + m + s) % 2]
        jobs.append(Job(settings=settings_of(cases[name], folder / name, count, mode), sharding=sharding, optim=optim))
    expected = {
        (name, job.optim.name): reference(job.settings, cases[name].lengths, cases[name].spans, optim=job.optim)
        for name, job in zip(names, jobs, strict=True)
    }
    for name, job, taken in zip(names, jobs, run_jobs(count, jobs), strict=True):
        check_steps(taken, expected[name, job.optim.name], job.optim)
        check_spread(name, job.settings, taken)


def check_spread(name: str, settings: LoaderSettings, taken: Sequence[Taken]) -> None:
    """The case is what its name says, and rings sent what the plan says."""
    first = [rank.counts[0] for rank in taken]
    if settings.mode == "free" and len(taken) > 1 and name == "uneven":
        assert len(set(first)) > 1
    if name in ("empty_rank", "unsupervised"):
        documents = {"empty_rank": 1, "unsupervised": 2}[name]
        assert sum(first) == documents
        assert first.count(0) == max(len(taken) - documents, 0)
    rows, rings = rings_of(settings)
    if name.startswith("rings"):
        assert max(rings) == WIDEST[settings.ranks, settings.capacity]
        assert len(rings) >= 2
    # Forward keys and values, backward the same again and their gradients, all in float64.
    assert sum(rank.sent for rank in taken) == rows * CONFIG.layers * 2 * CONFIG.kv_heads * CONFIG.head_dim * 8 * 3


def rings_of(settings: LoaderSettings) -> tuple[int, list[int]]:
    """Rows that the rings of the first steps send, and the rings' sizes."""
    plans = plans_of(settings)
    sizes = [np.diff(plan.ring_offsets) for plan in plans]
    rows = sum(int(rows_sent(plan.lengths, each).sum()) for plan, each in zip(plans, sizes, strict=True))
    return rows, [size for each in sizes for size in each.tolist() if size > 1]


def test_float32_is_at_most_twice_as_far_off_as_one_process(tmp_path: Path) -> None:
    """Of the first step: from then on the weights differ."""
    jobs, limits = [], []
    for name in ("uneven", "rings_20"):
        case = cases_for(3)[name]
        each = [settings_of(case, tmp_path / name, 3, mode) for mode in MODES]
        exact, alone = (reference(each[0], case.lengths, dtype=dtype).gradients[0] for dtype in ("float64", "float32"))
        for settings, sharding in product(each, SHARDINGS):
            jobs.append(Job(settings=settings, sharding=sharding, dtype="float32"))
            limits.append((exact, 2 * relative_error(alone, exact)))
    for (exact, limit), taken in zip(limits, run_jobs(3, jobs), strict=True):
        assert 0 < relative_error(taken[0].gradients[0], exact) <= limit
