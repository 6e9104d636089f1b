"""A vocabulary over ranks: the loss and gradients of the whole one, errors alike on all members, one group used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from seqmesh.kernels import chunks
from seqmesh.kernels.loss import UNSUPERVISED, linear_cross_entropy_sum
from seqmesh.kernels.vocabulary import vocab_parallel_cross_entropy_sum
from seqmesh.trainer.parallel import Ranks
from tests.kernels.reference import relative_error
from tests.ranks import run_ranks

RANKS, WIDTH = 4, 6
SIZES: Sequence[Sequence[int]] = ([7], [3, 4], [5, 0], [1, 2, 3], [3, 0, 5, 2], [0, 0, 0, 1])
LABELS = {
    "mixed": [1, 0, UNSUPERVISED, 2, 0, 1, UNSUPERVISED, 2, 1, 0],
    "ignored": [UNSUPERVISED] * 3,
    "none": [],
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_on_a_rank, RANKS)


def _on_a_rank(ranks: Ranks) -> dict[str, Any]:
    chunks.CHUNK_ROWS = 3
    groups = {size: dist.new_group(list(range(size))) for size in range(1, RANKS + 1)}
    found: dict[str, Any] = {"errors": {}, "refusals": {}}
    for sizes in SIZES:
        group = groups[len(sizes)]
        if ranks.rank < len(sizes):  # the others are not there at all
            for name, labels in LABELS.items():
                for dtype in TOLERANCE:
                    key = (tuple(sizes), name, str(dtype))
                    found["errors"][key] = _errors(sizes, ranks.rank, labels, dtype, group)
    found["refusals"] = _refusals(ranks.rank, groups[RANKS])
    return found


def _inputs(sizes: Sequence[int], labels: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden with NaN in rows that have no label, the whole weight, labels over all of its rows."""
    generator = torch.Generator().manual_seed(sum(sizes))
    hidden = torch.randn(len(labels), WIDTH, generator=generator).to(dtype)
    weight = torch.randn(sum(sizes), WIDTH, generator=generator).to(dtype)
    ids = torch.tensor(labels, dtype=torch.int32)
    ids = torch.where(ids == UNSUPERVISED, ids, (ids * 3 + torch.arange(len(ids), dtype=torch.int32)) % sum(sizes))
    hidden[ids == UNSUPERVISED] = math.nan
    return hidden, weight, ids


def _errors(
    sizes: Sequence[int], rank: int, labels: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[float, ...]:
    """Of the loss, the shares' sum, the shard's gradient, and the loss without gradients; against one member."""
    hidden, weight, ids = _inputs(sizes, labels, dtype)
    whole = [x.double().requires_grad_() for x in (hidden, weight)]
    expected, count = linear_cross_entropy_sum(whole[0], whole[1], ids)
    dhidden, dweight = torch.autograd.grad(expected * 0.3, whole)
    first, last = sum(sizes[:rank]), sum(sizes[: rank + 1])
    own, shard = hidden.clone().requires_grad_(), weight[first:last].clone().requires_grad_()
    total, counted = vocab_parallel_cross_entropy_sum(own, shard, ids, group)
    share, dshard = torch.autograd.grad(total * 0.3, (own, shard))
    dist.all_reduce(share, group=group)
    with torch.no_grad():
        alone, _ = vocab_parallel_cross_entropy_sum(own, shard, ids, group)
    assert int(counted) == int(count)
    assert not share[ids == UNSUPERVISED].any()
    pairs = ((total, expected), (share, dhidden), (dshard, dweight[first:last]), (alone, expected))
    return tuple(relative_error(got, want) for got, want in pairs)


def _refusals(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    """What each rank is told where labels are beyond the vocabulary, or members' inputs differ."""
    hidden, shard, good = torch.ones(3, WIDTH), torch.ones(2, WIDTH), torch.tensor([0, 7, UNSUPERVISED])
    cases = {
        "beyond": (hidden, shard, torch.tensor([0, UNSUPERVISED, 8])),
        "negative": (hidden, shard, torch.tensor([0, -5, 7])),
        "other labels": (hidden, shard, good if rank != 2 else torch.tensor([0, 7, 3])),
        "other rows": (hidden, shard, good) if rank != 1 else (hidden[:2], shard, good[:2]),
        "empty": (hidden, shard[:0], good),
    }
    said = {}
    for name, arguments in cases.items():
        try:
            vocab_parallel_cross_entropy_sum(*arguments, group)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def test_it_equals_the_whole_vocabulary(found: list[dict[str, Any]]) -> None:
    compared = 0
    for rank in found:
        for (_, _, dtype), errors in rank["errors"].items():
            limit = next(value for key, value in TOLERANCE.items() if str(key) == dtype)
            assert all(error <= limit for error in errors), (dtype, errors)
            compared += 1
    assert compared == sum(map(len, SIZES)) * len(LABELS) * len(TOLERANCE)


def test_all_members_are_told_the_same(found: list[dict[str, Any]]) -> None:
    said = found[0]["refusals"]
    assert all(rank["refusals"] == said for rank in found)
    assert said == {
        "beyond": "labels[2] is 8: must be -100 or from 0 to 7",
        "negative": "labels[1] is -5: must be -100 or from 0 to 7",
        "other labels": "supervised labels of the group's members are [2, 2, 3, 2]: must be the same on all",
        "other rows": "rows of the group's members are [3, 2, 3, 3]: must be the same on all",
        "empty": "weight_shard has no rows on any member: the vocabulary is empty",
    }
