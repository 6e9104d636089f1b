"""A mixture of experts in place of an MLP: a router chooses two of many small MLPs for each row (Mixtral; Jiang et al.
2024), and every row goes through both, however many choose the same: no expert has a capacity, no row is dropped.

Experts are spread over tensor peers, who all have all rows: each computes the rows that chose its own experts, and what
it gives is its part of a sum over peers. The router is whole on every peer.

Experts are kept evenly loaded by a number for each that is added to its probability for the choice alone (DeepSeek-V3);
it moves a little between steps. A term of the loss would depend on what is packed together, and so on the plan; this
depends on the step's documents alone. Rows are counted in backward, which comes once for each micro-batch: a forward
pass that is run again, or for its result only, counts nothing.

Shapes: T rows, W width, E experts, F width of one, R rows that chose experts of this peer, once for each choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from seqmesh.kernels.activation import gelu, swiglu
from seqmesh.kernels.grouped import grouped_linear
from seqmesh.kernels.layout import Layout
from seqmesh.kernels.tensor_parallel import Peers
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import first_of
from seqmesh.trainer.models.linear import make_linear


class Experts(nn.Module):
    """The sum of the two experts that a row's router finds likeliest, weighted by their probabilities, these two made
    to sum to 1. Logits [T, E], as `columns` make them of rows, and rows [T, W] -> [T, W], this peer's part of it; rows
    after the layout's last segment give zeros.

    balance [E]: what is added to probabilities for the choice; `models.balance` moves it. counts [E]: rows that
    chose each expert of all peers, since they were taken.
    """

    balance: Tensor
    counts: Tensor

    def __init__(self, config: ModelConfig, peers: Peers) -> None:
        super().__init__()
        assert config.experts is not None
        first, end = (first_of(config.experts, rank, peers.count) for rank in (peers.rank, peers.rank + 1))
        self.own = range(first, end)
        self.router = make_linear(config.width, config.experts, bias=False)
        self.experts = Stacks(config, len(self.own))
        self.register_buffer("balance", torch.zeros(config.experts))
        self.register_buffer("counts", torch.zeros(config.experts, dtype=torch.int64), persistent=False)

    @property
    def columns(self) -> tuple[nn.Linear, ...]:
        return (self.router,)

    def forward(self, logits: Tensor, n: Tensor, layout: Layout) -> Tensor:
        chosen = self._choose(logits.detach())
        real = torch.arange(len(n), device=n.device) < layout.cu_seqlens[-1]
        routes = make_routes(chosen.masked_fill(~real, len(self.balance)), len(self.balance), self.own)
        shares = _wide(logits).gather(1, chosen.T).softmax(dim=1).to(n.dtype)
        shares = _CountInBackward.apply(shares, routes.loads, self.counts)  # type: ignore[no-untyped-call]
        rows = _Spread.apply(n, routes.choices)  # type: ignore[no-untyped-call]
        shares = shares.T.flatten().index_select(0, routes.choices)
        results = self.experts(rows, routes.counts) * shares[:, None]
        out: Tensor = _Join.apply(results, routes.choices, len(n))  # type: ignore[no-untyped-call]
        return out

    def take_counts(self) -> Tensor:
        """`counts`, which begin anew; zeros but on the first peer, who speaks for all."""
        counts = self.counts.clone() if self.own.start == 0 else torch.zeros_like(self.counts)
        self.counts.zero_()
        return counts

    def _choose(self, logits: Tensor) -> Tensor:
        """Logits [T, E] -> experts [2, T], of equal ones the first."""
        scores = _wide(logits).softmax(dim=1) + self.balance
        first = scores.argmax(dim=1)
        second = scores.scatter(1, first[:, None], -torch.inf).argmax(dim=1)
        return torch.stack((first, second))


class Stacks(nn.Module):
    """Some experts' matrices. Rows [R, W], sorted by expert -> [R, W]."""

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        self.gate = Stack(count, config.mlp_width, config.width) if config.activation == "swiglu" else None
        self.up = Stack(count, config.mlp_width, config.width)
        self.down = Stack(count, config.width, config.mlp_width)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        up = self.up(rows, counts)
        down: Tensor = self.down(gelu(up) if self.gate is None else swiglu(self.gate(rows, counts), up), counts)
        return down


class Stack(nn.Module):
    """`grouped_linear` with its weight [experts, O, I]."""

    def __init__(self, count: int, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return grouped_linear(rows, self.weight, counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """choices [R]: what this peer computes, sorted by expert: numbers of choices, of which there are 2T, all rows'
    likeliest experts, then all second ones. counts: how many are each own expert's. loads [E]: of all experts."""

    choices: Tensor
    counts: list[int]
    loads: Tensor


def make_routes(chosen: Tensor, experts: int, own: range) -> Routes:
    """chosen [2, T], `experts` where a row has none. The host waits for the loads: they are the sizes of all that
    follows. On the meta device, where nothing is known, they are even."""
    loads = (chosen.flatten()[:, None] == torch.arange(experts, device=chosen.device)).sum(dim=0)
    if chosen.is_meta:
        counts = [chosen.numel() * (expert + 1) // experts - chosen.numel() * expert // experts for expert in own]
    else:
        counts = loads[own.start : own.stop].tolist()
    first = (chosen.flatten() - own.start) % (experts + 1)  # own experts before all others
    return Routes(choices=first.argsort(stable=True)[: sum(counts)], counts=counts, loads=loads)


class _Spread(torch.autograd.Function):
    """Rows [T, W] -> those of the choices [R, W]."""

    @staticmethod
    def forward(ctx: Any, n: Tensor, choices: Tensor) -> Tensor:
        ctx.save_for_backward(choices)
        ctx.rows = len(n)
        return n.index_select(0, choices % len(n))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None]:
        (choices,) = ctx.saved_tensors
        return _joined(drows, choices, ctx.rows), None


class _Join(torch.autograd.Function):
    """Results of choices [R, W] -> of each row the sum of its own [T, W]."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, choices: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(choices)
        ctx.rows = rows
        return _joined(results, choices, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        (choices,) = ctx.saved_tensors
        return dout.index_select(0, choices % ctx.rows), None, None


def _joined(results: Tensor, choices: Tensor, rows: int) -> Tensor:
    """Each to its place, then the two of a row together: no order of additions that could vary, as atomics have."""
    both = results.new_zeros(2 * rows, results.shape[1])
    both.index_copy_(0, choices, results)
    return both[:rows] + both[rows:]


class _CountInBackward(torch.autograd.Function):
    """Nothing but for `counts`, to which backward adds the loads."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, loads: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(loads)
        ctx.counts = counts
        return shares.view_as(shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dshares: Tensor) -> tuple[Tensor, None, None]:
        ctx.counts += ctx.saved_tensors[0]
        return dshares, None, None


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
