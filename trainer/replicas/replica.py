"""What a step needs of a model that is spread over processes, whichever way."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.part import Saved

Sharding = Literal["replicated", "optimizer", "parameters"]


class Replica(Protocol):
    """One process's part of a model. Gradients are summed over replicas, never averaged: the loss was divided by the
    whole step's count.

    extra [n] float64: numbers that `reduce_` sums with the gradient, over all processes: of what several processes of a
    replica know, one may say it. runs_every_wave: whether a replica without tokens must run the model all the same.

    A step is: begin_step; before_backward and backward, once per micro-batch; reduce_; norm, scale_, update; zero_.
    All processes call the methods marked (all) together.
    """

    extra: Tensor
    runs_every_wave: bool

    def make_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        """Over what this process has to update."""

    def begin_step(self) -> None:
        """(all) Start what can be sent while the step's first batch is waited for."""

    def before_backward(self, *, last: bool) -> None:
        """To be called before each micro-batch; last: of this replica in the step."""

    def reduce_(self) -> None:
        """(all) Sum the gradient over all that has a share in it: replicas; tensor peers, of what each of them has
        whole; both ends of a pipeline, of an embedding that is also the head. Sum `extra`."""

    def norm(self) -> float:
        """Euclidean norm of the whole model's gradient as `reduce_` left it: the same bits on all processes, and not
        finite on all where the gradient of any is not."""

    def scale_(self, factor: float) -> None:
        """Multiply the gradient."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """(all) Step the optimizer; every process has what it needs of the new parameters."""

    def zero_(self) -> None:
        """Clear gradient and `extra` for the next step."""

    def tensors(self, optimizer: torch.optim.Optimizer) -> Saved:
        """The model and the optimizer's state by name, as they lie here; state that is not there yet is made as zeros,
        so that a checkpoint can be copied into it."""

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """(all) Something was copied into `tensors`: make the rest of this process's state follow from it."""
