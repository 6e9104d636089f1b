"""One optimizer step from a plan: accumulate every micro-batch, reduce once, update.

The loss is the sum over a rank's supervised tokens divided by the supervised tokens of the whole step, which the plan
knows before the first micro-batch; gradients are summed over ranks. So the gradient is that of one process running
document by document, whatever the plan: ranks may differ in their number of micro-batches, and one without documents
takes part in the reduction with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import cross_entropy_sum
from seqmesh.loader.batch import PackedBatch
from seqmesh.trainer.optim import OptimConfig, clip_, learning_rate, set_rate
from seqmesh.trainer.parallel import GradientBuffer

EXTRA = 3  # numbers that travel with the gradient: loss sum, tokens, room


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """loss: mean over the step's supervised tokens, on all ranks; NaN where there are none. grad_norm: before
    clipping. fill: tokens over the capacity of all micro-batches. updated: False where the step had nothing to learn
    from or its gradient was not finite, and the weights were left alone."""

    loss: float
    grad_norm: float
    fill: float
    lr: float
    updated: bool


def accumulate(model: nn.Module, batch: PackedBatch[Tensor], buffer: GradientBuffer, capacity: int) -> None:
    """Run one micro-batch forward and backward into the buffer. A batch of no tokens is a rank without documents."""
    if batch.tokens == 0:
        return
    layout = Layout(batch.cu_seqlens, batch.max_seqlen)
    logits = model(batch.input_ids, batch.position_ids, layout)
    loss_sum, _ = cross_entropy_sum(logits, batch.labels)
    torch.autograd.backward(loss_sum / max(batch.supervised_tokens_in_step, 1))
    buffer.extra += torch.stack([loss_sum.detach(), *logits.new_tensor([batch.tokens, capacity])])


def finish_step(
    buffer: GradientBuffer,
    optimizer: torch.optim.Optimizer,
    config: OptimConfig,
    *,
    supervised: int,
    step: int,
    steps: int,
) -> StepResult:
    """Clip, update, and clear the reduced buffer. All ranks see the same sums, so all decide alike.

    step: from 0, of `steps`; supervised: supervised tokens of the whole step.
    """
    loss_sum, tokens, room = buffer.extra.tolist()
    norm = clip_(buffer.gradient, config.clip)
    rate = learning_rate(config, step, steps)
    updated = supervised > 0 and math.isfinite(norm)
    if updated:
        set_rate(optimizer, rate)
        optimizer.step()
    buffer.zero_()
    loss = loss_sum / supervised if supervised else math.nan
    return StepResult(loss=loss, grad_norm=norm, fill=tokens / room if room else 1.0, lr=rate, updated=updated)
