"""Numbers of a step that all ranks must agree on, in one small reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqmesh.trainer.models.balance import loads_size, move_biases_, take_loads
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.optim.norms import square_sum
from seqmesh.trainer.parallel import Ranks


class Totals:
    """The caller's `extra` [n], the square sum of the gradient, of which every rank adds up its own part, and how many
    rows the model's experts had.

    One reduction gives all ranks the same bits, so that they clip alike, and skip alike: a number that is not finite on
    any rank makes the sum so on all. float64: counts of tokens are exact.
    """

    def __init__(self, model: Transformer, ranks: Ranks, extra: int) -> None:
        self._model, self._ranks = model, ranks
        sizes = [extra, 1, loads_size(model.config)]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.float64, device=ranks.device)
        self.extra, self._square, self._loads = torch.split(self._numbers, sizes)

    def reduce_(self, gradient: Sequence[Tensor]) -> None:
        """gradient: this rank's part of the reduced gradient; the parts of all ranks are the whole, once."""
        self._square[0] = square_sum(gradient)
        self._loads.copy_(take_loads(self._model))
        self._ranks.sum_(self._numbers)

    def norm(self) -> float:
        return float(self._square.sqrt())

    def balance_(self) -> None:
        move_biases_(self._model, self._loads)

    def zero_(self) -> None:
        self._numbers.zero_()
