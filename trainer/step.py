"""One optimizer step from a plan: accumulate every micro-batch, reduce once, update.

Ranks may differ in their number of micro-batches, and one without documents takes part in the reduction with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from seqmesh.trainer.optim.config import OptimConfig, learning_rate, set_rate
from seqmesh.trainer.passes import Batch, Passes
from seqmesh.trainer.pipeline.run import Pipeline
from seqmesh.trainer.replicas.filler import run_filler
from seqmesh.trainer.replicas.replica import Replica

EXTRA = 5  # numbers that travel with the gradient: loss sum, tokens, room, rows, attended pairs; then experts' loads


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """loss: mean over the step's supervised tokens, on all ranks; NaN where there are none. grad_norm: before
    clipping. fill: tokens over the capacity of all micro-batches. rows: tokens with padding. layer_pairs: attended
    pairs, summed over layers. updated: False where the step had nothing to learn from or its gradient was not finite,
    and the weights were left alone. loads: of experts, as `balance.take_loads` has them, of all replicas."""

    loss: float
    grad_norm: float
    fill: float
    rows: float
    layer_pairs: float
    lr: float
    updated: bool
    loads: Sequence[float] = ()


class Runner(Protocol):
    """Who makes all passes of a step on this process."""

    passes: Passes

    def run(self, batches: Iterable[Batch]) -> None:
        """batches: this rank's of one step, in order, taken when they are needed."""


class Accumulator:
    """The runner of a model that is whole: one micro-batch after the other. One of no tokens is a rank's that has
    nothing to do in this wave: it runs a filler of weight zero where the replica needs every rank in every wave."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def run(self, batches: Iterable[Batch]) -> None:
        passes = self.passes
        for batch in batches:
            if batch.tokens > 0:
                passes.begin(batch)
                passes.forward(batch).backward()
            elif passes.replica.runs_every_wave:
                passes.begin(batch)
                run_filler(passes.model, batch.input_ids.device)


def make_runner(passes: Passes, parts: int = 1) -> Runner:
    """parts: that each stage of a pipeline has."""
    return Pipeline(passes, parts) if passes.grid.stages.count > 1 else Accumulator(passes)


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
    loss_sum, tokens, room, rows, layer_pairs, *loads = replica.extra.tolist()
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
        loads=loads,
    )
