"""LAMB (You et al. 2020, arXiv 1904.00962), on whole parameters or on any rank's part of them.

Each parameter's step is Adam's, with bias correction and decoupled decay, times the trust ratio: the norm of the
parameter over that of the step. Norms are those of the model's whole parameters, wherever their elements lie: every
rank adds up its own squares, and ONE reduction sums them all, before the roots. A norm of zero makes the ratio 1: a
parameter that begins as zeros moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqmesh.trainer.optim.norms import square_sums
from seqmesh.trainer.optim.trained import Trained, local, state_of

Sum = Callable[[Tensor], None]  # replaces a tensor by its sum over the ranks that hold parts


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
        """Update every parameter from its gradient. With `sum_`, all ranks that hold parts must call it together."""
        weights: list[Tensor] = []
        steps: list[Tensor] = []
        owners: list[int] = []
        rates: list[float] = []
        for group in self.param_groups:
            for parameter, step in zip(group["params"], self._adam_steps(group), strict=True):
                parts = self._trained[parameter]
                weights += torch.split(local(parameter).view(-1), list(parts.sizes))
                steps += torch.split(step.view(-1), list(parts.sizes))
                owners += parts.owners
                rates += [group["lr"]] * len(parts.owners)
        ratios = self._trust_ratios(weights, steps, owners)
        torch._foreach_mul_(steps, [-rate * ratios[owner] for rate, owner in zip(rates, owners, strict=True)])
        torch._foreach_add_(weights, steps)

    def _adam_steps(self, group: dict[str, Any]) -> list[Tensor]:
        """Bias-corrected m / (√v + ε) + decay · parameter of each parameter; the moments move on."""
        if not group["params"]:
            return []
        (beta1, beta2), states = group["betas"], [state_of(self, p) for p in group["params"]]
        weights, gradients = [local(p) for p in group["params"]], [local(p.grad) for p in group["params"]]
        means, squares = ([local(state[slot]) for state in states] for slot in ("exp_avg", "exp_avg_sq"))
        torch._foreach_add_([state["step"] for state in states], 1)
        count = states[0]["step"].item()
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        unbiased = (1 - beta2**count) ** 0.5
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"] * unbiased)
        steps = list(torch._foreach_div(means, roots))
        torch._foreach_mul_(steps, unbiased / (1 - beta1**count))
        if group["weight_decay"]:
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        return steps

    def _trust_ratios(self, weights: Sequence[Tensor], steps: Sequence[Tensor], owners: Sequence[int]) -> list[float]:
        sums = torch.cat([square_sums(weights, owners, self._count), square_sums(steps, owners, self._count)])
        if self._sum is not None:
            self._sum(sums)
        weight, step = sums.sqrt().chunk(2)
        ratios: list[float] = torch.where((weight > 0) & (step > 0), weight / step, 1.0).tolist()
        return ratios
