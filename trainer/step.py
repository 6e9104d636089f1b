"""One optimizer step from a plan: accumulate every micro-batch, reduce once, update.

The loss is the sum over a rank's supervised tokens divided by the supervised tokens of the whole step, which the plan
knows before the first micro-batch; gradients are summed over ranks. So the gradient is that of one process running
document by document, whatever the plan: ranks may differ in their number of micro-batches, and one without documents
takes part in the reduction with zeros.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqmesh.kernels.layout import Layout, Ring, Traffic
from seqmesh.loader.batch import PackedBatch
from seqmesh.packer.pieces import chunk_sizes, piece_tokens
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.offload import Offloader, offloaded
from seqmesh.trainer.optim.config import OptimConfig, learning_rate, set_rate
from seqmesh.trainer.replicas.filler import run_filler
from seqmesh.trainer.replicas.replica import Replica

EXTRA = 5  # numbers that travel with the gradient: loss sum, tokens, room, rows, attended pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """loss: mean over the step's supervised tokens, on all ranks; NaN where there are none. grad_norm: before
    clipping. fill: tokens over the capacity of all micro-batches. rows: tokens with padding. layer_pairs: attended
    pairs, summed over layers. updated: False where the step had nothing to learn from or its gradient was not finite,
    and the weights were left alone."""

    loss: float
    grad_norm: float
    fill: float
    rows: float
    layer_pairs: float
    lr: float
    updated: bool


def accumulate(
    model: nn.Module,
    batch: PackedBatch[Tensor],
    replica: Replica,
    capacity: int,
    traffic: Traffic | None = None,
    layer_pairs: int = 0,
    offloader: Offloader | None = None,
) -> None:
    """Run one micro-batch forward and backward, offloaded as far as it asks for. A batch of no tokens is a rank that
    has nothing to do in this wave: it runs a filler of weight zero where the replica needs every rank in every wave.
    layer_pairs: of its attention, to be summed over ranks."""
    if batch.tokens == 0:
        if replica.runs_every_wave:
            replica.before_backward(last=batch.last_in_step)
            assert isinstance(model, Transformer)
            run_filler(model, batch.input_ids.device)
        return
    replica.before_backward(last=batch.last_in_step)
    with offloaded(offloader, batch.offload_ratio):
        loss_sum, _ = model(batch.input_ids, batch.position_ids, layout_of(batch, traffic or Traffic()), batch.labels)
        torch.autograd.backward(loss_sum / max(batch.supervised_tokens_in_step, 1))
    counts = [batch.tokens, capacity, len(batch.input_ids), layer_pairs]
    replica.extra += torch.stack([loss_sum.detach().to(replica.extra), *replica.extra.new_tensor(counts)])


def layout_of(batch: PackedBatch[Tensor], traffic: Traffic) -> Layout:
    """The kernels' view of a batch: its segments, and which of them are pieces of rings."""
    sizes, members = batch.ring_sizes.tolist(), batch.ring_ranks.tolist()
    lengths, indices = batch.document_lengths.tolist(), batch.ring_indices.tolist()
    ends = itertools.accumulate(sizes)
    # Where segments begin is counted here, not read from cu_seqlens: those may lie on a device.
    starts = itertools.accumulate(map(piece_tokens, lengths, sizes, indices), initial=0)
    rings = tuple(
        Ring(
            segment=i,
            start=start,
            ranks=tuple(members[end - size : end]),
            index=index,
            chunks=chunk_sizes(length, size),
        )
        for i, (length, size, index, end, start) in enumerate(zip(lengths, sizes, indices, ends, starts, strict=False))
        if size > 1
    )
    return Layout(batch.cu_seqlens, batch.max_seqlen, rings, traffic)


def finish_step(
    replica: Replica,
    optimizer: torch.optim.Optimizer,
    config: OptimConfig,
    *,
    supervised: int,
    step: int,
    steps: int,
) -> StepResult:
    """Clip, update, and clear the reduced gradient. All ranks see the same sums, so all decide alike.

    step: from 0, of `steps`; supervised: supervised tokens of the whole step.
    """
    loss_sum, tokens, room, rows, layer_pairs = replica.extra.tolist()
    norm = replica.norm()
    if config.clip is not None and config.clip < norm < math.inf:
        replica.scale_(config.clip / norm)
    rate = learning_rate(config, step, steps)
    updated = supervised > 0 and math.isfinite(norm)
    if updated:
        set_rate(optimizer, rate)
        replica.update(optimizer)
    replica.zero_()
    loss = loss_sum / supervised if supervised else math.nan
    return StepResult(
        loss=loss,
        grad_norm=norm,
        fill=tokens / room if room else 1.0,
        rows=rows,
        layer_pairs=layer_pairs,
        lr=rate,
        updated=updated,
    )
