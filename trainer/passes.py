"""What one process does with one micro-batch: its part of the model forward, and backward again.

The loss is the sum over a rank's supervised tokens divided by the supervised tokens of the whole step, which the plan
knows before the first micro-batch; gradients are summed over ranks. So the gradient is that of one process running
document by document, whatever the plan. In which order passes are made is the runner's: `step`, `pipeline`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqmesh.kernels.layout import Layout, Ring, Traffic
from seqmesh.loader.batch import PackedBatch
from seqmesh.packer.pieces import chunk_sizes, piece_tokens
from seqmesh.trainer.flops import Work
from seqmesh.trainer.grid import Grid
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.offload import Offloader, Pass, offload
from seqmesh.trainer.replicas.replica import Replica

Batch = PackedBatch[Tensor]


@dataclass(slots=True)
class Flight:
    """A micro-batch between the forward and the backward of a part. out: rows for the next part, or, at the model's
    end, the loss; x: what it was made of, where that came from another process."""

    out: Tensor
    x: Tensor | None
    offload: Pass

    def backward(self, gradient: Tensor | None = None) -> Tensor | None:
        """gradient: of the rows; None for the loss. Returns that of x. Once."""
        with self.offload.backward():
            torch.autograd.backward(self.out, gradient)
        return None if self.x is None else self.x.grad


@dataclass(slots=True, kw_only=True)
class Passes:
    """model: what this process holds of it. capacity: most tokens of a micro-batch. work: what attended pairs are
    counted by, None for not at all. traffic: sent for rings, so far or since somebody put another in its place."""

    model: Transformer
    replica: Replica
    grid: Grid
    capacity: int
    work: Work | None = None
    offloader: Offloader | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def begin(self, batch: Batch) -> None:
        """To be called before a micro-batch's first forward."""
        self.replica.before_backward(last=batch.last_in_step)

    def forward(self, batch: Batch, part: int = 0, x: Tensor | None = None, *, at_once: bool = True) -> Flight:
        """One part of the model. x: the rows before it, [R, W]; None where nothing is. at_once: whether its backward
        comes next."""
        layout = layout_of(batch, self.traffic, self.grid.process)
        one = offload(self.offloader, batch.offload_ratio, at_once=at_once)
        given = batch.input_ids if x is None else x.requires_grad_()
        with one.forward():
            out = self.model(given, batch.position_ids, layout, batch.labels, part=part)
        if isinstance(out, tuple):
            loss_sum, _ = out
            self._count(batch, loss_sum.detach())
            out = loss_sum / max(batch.supervised_tokens_in_step, 1)
        return Flight(out, x, one)

    def room(self, batch: Batch) -> Tensor:
        """For a micro-batch's rows between two layers, [R, W], or their gradient; anything may be in it."""
        rows, parameter = self.model.rows(len(batch.position_ids)), next(self.model.parameters())
        return torch.empty(rows, self.model.config.width, dtype=parameter.dtype, device=parameter.device)

    def _count(self, batch: Batch, loss_sum: Tensor) -> None:
        if self.grid.speaks:
            extra, rows = self.replica.extra, len(batch.input_ids)
            counts = extra.new_tensor([batch.tokens, self.capacity, rows, self._layer_pairs(batch)])
            extra[: 1 + len(counts)] += torch.cat([loss_sum.to(extra).view(1), counts])

    def _layer_pairs(self, batch: Batch) -> int:
        if self.work is None:
            return 0
        pieces = (batch.document_lengths, batch.ring_sizes, batch.ring_indices)
        lengths, sizes, indices = (tensor.numpy() for tensor in pieces)  # they are on the host, as int64
        return self.work.layer_pairs(lengths, sizes, indices)


def layout_of(batch: Batch, traffic: Traffic, process: Callable[[int], int] = int) -> Layout:
    """The kernels' view of a batch: its segments, and which of them are pieces of rings. process: of each rank's, the
    one that this process shares rings with; its own number, where a rank is one process."""
    sizes, members = batch.ring_sizes.tolist(), batch.ring_ranks.tolist()
    lengths, indices = batch.document_lengths.tolist(), batch.ring_indices.tolist()
    ends = itertools.accumulate(sizes)
    # Where segments begin is counted here, not read from cu_seqlens: those may lie on a device.
    starts = itertools.accumulate(map(piece_tokens, lengths, sizes, indices), initial=0)
    rings = tuple(
        Ring(
            segment=i,
            start=start,
            ranks=tuple(map(process, members[end - size : end])),
            index=index,
            chunks=chunk_sizes(length, size),
        )
        for i, (length, size, index, end, start) in enumerate(zip(lengths, sizes, indices, ends, starts, strict=False))
        if size > 1
    )
    return Layout(batch.cu_seqlens, batch.max_seqlen, rings, traffic)
