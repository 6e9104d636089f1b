"""Attention as an operator: what torch's own checks ask, one graph for all packs, and the refusals inside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout
from seqmesh.kernels.operators import attend_backward, attend_forward
from tests.kernels.reference import layout_of

PACKS = [[3, 4], [5, 1, 0, 9], [2], [1] * 7, [30], [0, 6]]


def random_rows(rows: int, gradient: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64).requires_grad_(gradient)
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("window", [None, 2])
def test_operators_keep_torchs_rules(window: int | None) -> None:
    q, k, v = random_rows(9)
    cu = torch.tensor([0, 4, 4, 8], dtype=torch.int32)
    settings = (cu, cu, 4, 4, True, window, 0.3, "auto")
    torch.library.opcheck(attend_forward, (q, k, v, *settings, True))
    out, lse = (x.detach() for x in attend_forward(q, k, v, *settings, False))
    rows = [x.detach() for x in (torch.ones_like(q), q, k, v)]
    torch.library.opcheck(attend_backward, (*rows, out, lse, *settings))


def test_one_graph_serves_all_packs() -> None:
    graphs = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:  # noqa: ARG001
        graphs.append(graph)
        forward: Callable[..., Any] = graph.forward
        return forward

    def layer(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return 2 * varlen_attention(q + 1, k, v, layout, window=5)

    compiled = torch.compile(layer, backend=note, fullgraph=True, dynamic=True)
    for padding, lengths in enumerate(PACKS):
        rows, layout = random_rows(sum(lengths) + padding), layout_of(lengths)
        for got, expected in zip(run(compiled, rows, layout), run(layer, rows, layout), strict=True):
            assert torch.equal(got, expected)
    assert len(graphs) == 1


def run(layer: Callable[..., Tensor], rows: list[Tensor], layout: Layout) -> list[Tensor]:
    out = layer(*rows, layout)
    return [out, *torch.autograd.grad(out, rows, torch.ones_like(out))]


def test_a_second_derivative_is_refused() -> None:
    q, k, v = random_rows(5)
    out = varlen_attention(q, k, v, layout_of([5]))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attend_backward"):
        torch.autograd.grad(dq.sum(), k)


def test_compiled_code_refuses_what_eager_code_refuses() -> None:
    compiled = torch.compile(varlen_attention, backend="eager", fullgraph=True, dynamic=True)
    q, k, v = random_rows(5)
    with pytest.raises(ValueError, match=re.escape("cu_seqlens ends at 6, beyond the 5 rows of q")):
        compiled(q, k, v, layout_of([2, 4]))
    q, k, v = (torch.ones(4, 2, 4, dtype=torch.int64) for _ in range(3))
    with pytest.raises(NotImplementedError, match=re.escape("dtype is torch.int64")):
        compiled(q, k, v, layout_of([4]))
