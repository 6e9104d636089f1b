"""A loss averaged per rank or per micro-batch instead of over the supervised tokens of the whole step."""

import math
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import cross_entropy_sum
from seqmesh.loader.batch import PackedBatch
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.optim import OptimConfig, make_optimizer
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.passes import Passes
from seqmesh.trainer.replicas.replicated import Replicated
from seqmesh.trainer.step import EXTRA, Accumulator, StepResult, finish_step
from tests.ranks import run_ranks
from tests.trainer.held import holding_whole

LOSSES = (1.0, 5.0, 7.0)
UNSUPERVISED = -100

MicroBatch = Sequence[tuple[float, int]]  # (loss of each token, how many), or (any, 0) for tokens without a label


class FixedLosses(nn.Module):
    """Logits per token id such that label 0 costs exactly LOSSES[id]: log(1 + e^x) = loss for x = log(e^loss − 1)."""

    def __init__(self) -> None:
        super().__init__()
        rows = [[0.0, math.log(math.expm1(loss))] for loss in LOSSES]
        self.table = nn.Parameter(torch.tensor(rows, dtype=torch.float64))

    def forward(
        self, input_ids: Tensor, _position_ids: Tensor, _layout: Layout, labels: Tensor, part: int
    ) -> tuple[Tensor, Tensor]:
        assert part == 0
        return cross_entropy_sum(self.table[input_ids], labels)


def batch_of(content: MicroBatch, *, wave: int, waves: int, supervised: int) -> PackedBatch[Tensor]:
    ids = [LOSSES.index(loss) for loss, count in content for _ in range(max(count, 1))]
    labels = [0 if count else UNSUPERVISED for _, count in content for _ in range(max(count, 1))]
    segment = torch.zeros(1, dtype=torch.int64)
    return PackedBatch(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        labels=torch.tensor(labels, dtype=torch.int64),
        position_ids=torch.arange(len(ids), dtype=torch.int32),
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
        document_ids=segment,
        document_offsets=segment,
        document_lengths=segment + len(ids),
        ring_ids=segment - 1,
        ring_sizes=segment + 1,
        ring_indices=segment,
        ring_ranks=segment,
        max_seqlen=len(ids),
        pad=0,
        step=0,
        epoch=0,
        wave=wave,
        waves=waves,
        tokens=len(ids),
        tokens_in_step=len(ids),
        supervised_tokens_in_step=supervised,
        rings_in_step=0,
        imbalance=1.0,
        offload_ratio=0.0,
        plan="",
        next_plan="",
    )


def run_step(ranks: Ranks, work: Sequence[Sequence[MicroBatch]]) -> tuple[StepResult, list[float], bool]:
    """One step; `work[rank]` are that rank's micro-batches. The result, the gradient, whether the weights moved."""
    model = FixedLosses()
    before = model.table.detach().clone()
    replica = Replicated(holding_whole(model), one_each(ranks), extra=EXTRA)
    supervised = sum(count for batches in work for batch in batches for _, count in batch)
    mine = work[ranks.rank]
    grid = one_each(ranks)
    batches = [batch_of(each, wave=n, waves=len(mine), supervised=supervised) for n, each in enumerate(mine)]
    Accumulator(Passes(model=cast(Transformer, model), replica=replica, grid=grid, capacity=8)).run(batches)
    replica.reduce_()
    gradient = replica.gradient.tolist()
    optimizer = make_optimizer(model.parameters(), OptimConfig(lr=0.1))
    result = finish_step(replica, optimizer, OptimConfig(lr=0.1), supervised=supervised, step=0, steps=1)
    return result, gradient, not torch.equal(before, model.table)


@pytest.mark.parametrize(
    ("work", "mean"),
    [
        ([[[(1.0, 5)]], [[(7.0, 1)]]], 2.0),  # rank means would give 4.0
        ([[[(1.0, 3)], [(5.0, 1)]]], 2.0),  # a mean of micro-batch means would give 3.0
        ([[[(1.0, 3)]], [[(5.0, 0)]]], 1.0),  # rank 1 has tokens, but none to learn
        ([[[(1.0, 3)]], []], 1.0),  # rank 1 has nothing at all
    ],
)
def test_the_loss_is_the_mean_over_the_steps_supervised_tokens(
    work: Sequence[Sequence[MicroBatch]], mean: float
) -> None:
    for result, gradient, moved in run_ranks(run_step, len(work), work):
        assert result.loss == pytest.approx(mean, rel=1e-12)
        assert result.updated
        assert moved
        assert all(math.isfinite(value) for value in gradient)


def test_packed_unpacked_and_split_over_ranks_give_the_same_gradient() -> None:
    contents: list[Sequence[Sequence[MicroBatch]]] = [
        [[[(1.0, 5), (7.0, 1)]]],
        [[[(1.0, 5)], [(7.0, 1)]]],
        [[[(1.0, 2), (7.0, 1)]], [[(1.0, 3)]]],
        [[[(1.0, 1)], [(1.0, 4)]], [[(7.0, 1)]], []],
    ]
    gradients = [run_ranks(run_step, len(work), work)[0][1] for work in contents]
    for gradient in gradients[1:]:
        assert gradient == pytest.approx(gradients[0], rel=1e-12, abs=1e-15)


def test_a_step_with_nothing_to_learn_is_skipped_and_counted() -> None:
    work: list[Sequence[MicroBatch]] = [[[(1.0, 0)]], []]
    for result, gradient, moved in run_ranks(run_step, 2, work):
        assert not result.updated
        assert not moved
        assert math.isnan(result.loss)
        assert gradient == [0.0] * len(gradient)
