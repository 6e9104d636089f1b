"""What a step needs of a model that is spread over ranks, whichever way."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.part import Saved

Sharding = Literal["replicated", "optimizer", "parameters"]


class Replica(Protocol):
    """One rank's part of a model. Gradients are summed over ranks, never averaged: the loss was divided by the whole
    step's count.

    extra [n] float64: numbers of this rank that `reduce_` sums with the gradient. runs_every_wave: whether a rank
    without tokens must run the model all the same.

    A step is: begin_step; before_backward and backward, once per micro-batch; reduce_; norm, scale_, update; zero_.
    All ranks call the methods marked (all) together.
    """

    extra: Tensor
    runs_every_wave: bool

    def make_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        """Over what this rank has to update."""

    def begin_step(self) -> None:
        """(all) Start what can be sent while the step's first batch is waited for."""

    def before_backward(self, *, last: bool) -> None:
        """To be called before each micro-batch; last: of this rank in the step."""

    def reduce_(self) -> None:
        """(all) Sum gradient and `extra` over all ranks."""

    def norm(self) -> float:
        """Euclidean norm of the whole gradient as `reduce_` left it: the same bits on all ranks, and not finite on all
        where the gradient of any is not."""

    def scale_(self, factor: float) -> None:
        """Multiply the gradient."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """(all) Step the optimizer; every rank has what it needs of the new parameters."""

    def zero_(self) -> None:
        """Clear gradient and `extra` for the next step."""

    def tensors(self, optimizer: torch.optim.Optimizer) -> Saved:
        """The model and the optimizer's state by name, as they lie here; state that is not there yet is made as zeros,
        so that a checkpoint can be copied into it."""

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """(all) Something was copied into `tensors`: make the rest of this rank's state follow from it."""
