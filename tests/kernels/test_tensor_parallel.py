"""Linear layers over peers that hold parts of the rows: values and gradients of plain products, exchanges in order."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqmesh.kernels.tensor_parallel import Peers, gather_linear, sum_linear
from seqmesh.trainer.parallel import Ranks
from tests.kernels.reference import relative_error
from tests.ranks import run_ranks

RANKS, ROWS, WIDTH, INNER = 3, 12, 5, (2, 3)
NAMES = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "sum",
    **dict.fromkeys(("mm", "addmm", "addmm_"), "product"),
}


class Order(TorchDispatchMode):
    """Exchanges as they begin, and products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is not typed
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := NAMES.get(func._opname)) is not None:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def own_rows(whole: Tensor, peers: Peers) -> Tensor:
    """Of each chunk this peer's stretch."""
    return whole.view(peers.chunks, peers.count, -1, whole.shape[1])[:, peers.rank].flatten(0, 1)


def gathered(ranks: Ranks, peers: Peers) -> tuple[list[float], list[str]]:
    """Errors of results and gradients, and the order of backward."""
    x = numbers(ROWS, WIDTH, seed=0)
    weights = [[numbers(n, WIDTH, seed=10 * rank + n) for n in INNER] for rank in range(RANKS)]
    biases = [[numbers(INNER[0], seed=100 + rank), None] for rank in range(RANKS)]
    douts = [[numbers(ROWS, n, seed=200 + 10 * rank + n).detach() for n in (*INNER, WIDTH)] for rank in range(RANKS)]
    outs = [
        [x @ w.T if b is None else x @ w.T + b for w, b in zip(weights[rank], biases[rank], strict=True)] + [x * 1.0]
        for rank in range(RANKS)
    ]
    mine = [*weights[ranks.rank], *(b for b in biases[ranks.rank] if b is not None)]
    wanted = torch.autograd.grad(list(chain(*outs)), (x, *mine), list(chain(*douts)))
    own = own_rows(x.detach(), peers).requires_grad_()
    with Order() as forward:
        found = gather_linear(own, list(zip(weights[ranks.rank], biases[ranks.rank], strict=True)), peers, rows=True)
    with Order() as backward:
        gradients = torch.autograd.grad(found, (own, *mine), douts[ranks.rank])
    pairs = [*zip(found, outs[ranks.rank], strict=True), (gradients[0], own_rows(wanted[0], peers))]
    pairs += zip(gradients[1:], wanted[1:], strict=True)
    return [relative_error(*pair) for pair in pairs], [*forward.seen, "|", *backward.seen]


def summed(ranks: Ranks, peers: Peers) -> tuple[list[float], list[str]]:
    factors = [[numbers(ROWS, n, seed=10 * rank + n) for n in INNER] for rank in range(RANKS)]
    weights = [[numbers(WIDTH, n, seed=50 + 10 * rank + n) for n in INNER] for rank in range(RANKS)]
    partials = [numbers(ROWS, WIDTH, seed=300 + rank) for rank in range(RANKS)]
    products = [f @ w.T for each in zip(factors, weights, strict=True) for f, w in zip(*each, strict=True)]
    total, dout = sum([*products, *partials], torch.zeros(())), numbers(ROWS, WIDTH, seed=400).detach()
    mine = (*factors[ranks.rank], *weights[ranks.rank], partials[ranks.rank])
    wanted = torch.autograd.grad(total, mine, dout)
    with Order() as forward:
        found = sum_linear(factors[ranks.rank], weights[ranks.rank], peers, partial=partials[ranks.rank])
    with Order() as backward:
        gradients = torch.autograd.grad(found, mine, own_rows(dout, peers))
    pairs = [(found, own_rows(total, peers)), *zip(gradients, wanted, strict=True)]
    return [relative_error(*pair) for pair in pairs], [*forward.seen, "|", *backward.seen]


def alone(peers: Peers) -> list[float]:
    """Rows that are only gathered, and a sum that has no products."""
    x = numbers(ROWS, WIDTH, seed=0)
    own = own_rows(x.detach(), peers).requires_grad_()
    (rows,) = gather_linear(own, (), peers, rows=True)
    total = sum_linear((), (), peers, partial=rows * (1.0 + peers.rank))
    (gradient,) = torch.autograd.grad(total, own, own_rows(x.detach(), peers))
    factor = sum(1.0 + rank for rank in range(RANKS))
    return [relative_error(each, factor * own_rows(x.detach(), peers)) for each in (total, gradient)] + [
        relative_error(rows, x)
    ]


def work(ranks: Ranks) -> list[Any]:
    found = []
    for chunks in (1, 2):
        peers = Peers(group=dist.group.WORLD, rank=ranks.rank, count=RANKS, chunks=chunks)
        found.append((gathered(ranks, peers), summed(ranks, peers), alone(peers)))
    return found


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run_ranks(work, RANKS)


def test_results_and_gradients_are_those_of_plain_products(results: list[Any]) -> None:
    for rank in results:
        for (errors, _), (more, _), rest in rank:
            assert max(*errors, *more, *rest) <= 1e-14


def test_a_chunk_travels_while_another_is_computed_with(results: list[Any]) -> None:
    """All gathers begin before the first product, and each sum as soon as its own products are made; gradients of
    weights come last, beside the last sum. In chunks nothing is sent twice."""
    for rank in results:
        for chunks, ((_, gathering), (_, summing), _) in zip((1, 2), rank, strict=True):
            gathers, sums = ["gather"] * chunks + ["product"] * 2 * chunks, ["product", "product", "sum"] * chunks
            assert gathering == [*gathers, "|", *sums, *["product"] * 2]
            assert summing == [*sums, "|", *gathers, *["product"] * 2]


@pytest.mark.parametrize(
    ("packed", "count", "chunks", "rows"),
    [(12, 1, 1, 12), (13, 1, 5, 13), (12, 4, 1, 3), (13, 4, 1, 4), (13, 4, 3, 6), (1, 2, 3, 3), (0, 2, 3, 0)],
)
def test_rows_of_a_peer_are_padded_to_whole_chunks(packed: int, count: int, chunks: int, rows: int) -> None:
    assert Peers(count=count, chunks=chunks).rows(packed) == rows


def test_rows_that_are_no_whole_chunks_are_refused() -> None:
    x, weight = torch.zeros(4, 2), torch.zeros(2, 2)
    peers = Peers(count=2, chunks=3)
    with pytest.raises(ValueError, match="4 rows of a peer: must be a multiple of the chunks, 3"):
        gather_linear(x, [(weight, None)], peers)
    with pytest.raises(ValueError, match="4 rows of a peer: must be a multiple of the chunks, 3"):
        sum_linear([torch.zeros(8, 2)], [weight], peers)
