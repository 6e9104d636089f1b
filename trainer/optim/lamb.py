"""LAMB (You et al. 2020, arXiv 1904.00962), on whole parameters or on any rank's part of them.

Each parameter's step is Adam's, with bias correction and decoupled decay, times the trust ratio: the norm of the
parameter over that of the step. Norms are those of the model's whole parameters, wherever their elements lie: every
rank adds up the squares that are its to count, and ONE reduction sums them all, before the roots. A norm of zero makes
the ratio 1: a parameter that begins as zeros moves.

The step is written over the gradient, so no memory is needed for it. On a CPU this goes block by block, with all that
is done to a block while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqmesh.trainer.optim.norms import BLOCK
from seqmesh.trainer.optim.trained import Trained, local, state_of

Sum = Callable[[Tensor], None]  # replaces a tensor by its sum over the ranks that hold parts


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of one of the model's parameters, flat. owner: its number. counted: here, in its norms. gradient: the
    step, once that is known."""

    owner: int
    counted: bool
    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor


class Lamb(torch.optim.Optimizer):
    """groups: as torch has them. trained: what lies in their parameters, of `count` parameters of the model. sum_: None
    where every rank has all."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        trained: Sequence[Trained],
        count: int,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        sum_: Sum | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._trained = {each.parameter: each for each in trained}
        self._count = count
        self._sum = sum_

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: the gradient is there already
        """Update every parameter from its gradient, which is overwritten. With `sum_`, all ranks that hold parts must
        call it together."""
        batches: list[tuple[list[Run], float]] = []
        norms: list[Tensor] = []
        places: list[int] = []
        for group in self.param_groups:
            count = self._steps_done(group)
            for runs in self._batches(group):
                _make_steps(runs, group, count)
                if counted := [run for run in runs if run.counted]:
                    norms += torch._foreach_norm([run.weight for run in counted] + [run.gradient for run in counted])
                    places += self._places(counted)
                batches.append((runs, group["lr"]))
        ratios = self._trust_ratios(places, norms)
        for runs, rate in batches:
            steps = [run.gradient for run in runs]
            torch._foreach_mul_(steps, [-rate * ratios[run.owner] for run in runs])
            torch._foreach_add_([run.weight for run in runs], steps)

    def _steps_done(self, group: dict[str, Any]) -> float:
        """With this one."""
        counts = [state_of(self, parameter)["step"] for parameter in group["params"]]
        for count in counts:
            count.add_(1)
        return float(counts[0]) if counts else 0.0

    def _batches(self, group: dict[str, Any]) -> Iterator[list[Run]]:
        """What is worked on at once: a block on a CPU, everything elsewhere, for few kernels."""
        runs = [run for parameter in group["params"] for run in self._runs(parameter)]
        if runs and runs[0].weight.device.type != "cpu":
            yield runs
            return
        for run in runs:
            columns = (run.weight, run.gradient, run.mean, run.square)
            for blocks in zip(*(torch.split(column, BLOCK) for column in columns), strict=True):
                yield [Run(run.owner, run.counted, *blocks)]

    def _runs(self, parameter: nn.Parameter) -> Iterator[Run]:
        parts, state = self._trained[parameter], state_of(self, parameter)
        assert parameter.grad is not None, "a parameter has no gradient"
        columns = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        pieces = (torch.split(local(column).view(-1), list(parts.sizes)) for column in columns)
        for owner, *views in zip(parts.owners, *pieces, strict=True):
            yield Run(owner, parts.counted, *views)

    def _places(self, runs: Sequence[Run]) -> list[int]:
        """Where norms of a batch are added: those of the parameters, then those of their steps."""
        return [run.owner for run in runs] + [self._count + run.owner for run in runs]

    def _trust_ratios(self, places: Sequence[int], norms: Sequence[Tensor]) -> list[float]:
        """Of all parameters of the model."""
        device = next(parameter.device for group in self.param_groups for parameter in group["params"])
        sums = torch.zeros(2 * self._count, dtype=torch.float64, device=device)
        if norms:
            sums.index_add_(0, torch.tensor(places, device=device), torch.stack(list(norms)).double().square())
        if self._sum is not None:
            self._sum(sums)
        weight, step = sums.sqrt().chunk(2)
        ratios: list[float] = torch.where((weight > 0) & (step > 0), weight / step, 1.0).tolist()
        return ratios


def _make_steps(runs: Sequence[Run], group: dict[str, Any], count: float) -> None:
    """Move the moments on; then gradients become bias-corrected m / (√v + ε) + decay · parameter."""
    beta1, beta2 = group["betas"]
    weights, gradients = [run.weight for run in runs], [run.gradient for run in runs]
    means, squares = [run.mean for run in runs], [run.square for run in runs]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    unbiased = (1 - beta2**count) ** 0.5
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, group["eps"] * unbiased)
    torch._foreach_copy_(gradients, means)
    torch._foreach_div_(gradients, roots)
    torch._foreach_mul_(gradients, unbiased / (1 - beta1**count))
    if group["weight_decay"]:
        torch._foreach_add_(gradients, weights, alpha=group["weight_decay"])
