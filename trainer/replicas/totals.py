"""Numbers of a step that all processes must agree on, in one small reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqmesh.trainer.optim.norms import square_sum
from seqmesh.trainer.parallel import Ranks


class Totals:
    """The caller's `extra` [n] and the square sum of the gradient, of which every process adds up its own part.

    One reduction gives all of them the same bits, so that they clip alike, and skip alike: a number that is not finite
    on any makes the sum so on all. float64: counts of tokens are exact.
    """

    def __init__(self, world: Ranks, extra: int) -> None:
        self._world = world
        self._numbers = torch.zeros(extra + 1, dtype=torch.float64, device=world.device)
        self.extra = self._numbers[:extra]

    def reduce_(self, gradient: Sequence[Tensor]) -> None:
        """gradient: this process's part of the reduced one; the parts of all processes are the whole, once."""
        self._numbers[-1] = square_sum(gradient)
        self._world.sum_(self._numbers)

    def norm(self) -> float:
        return float(self._numbers[-1].sqrt())

    def zero_(self) -> None:
        self._numbers.zero_()
