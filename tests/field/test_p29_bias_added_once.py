"""A bias that every peer holds is added once: a parallel block over 1, 2 and 4 peers is the block of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.norm import rms_norm
from seqmesh.kernels.tensor_parallel import Peers, sum_linear
from seqmesh.trainer.models.blocks import ParallelBlock
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import Box, box_of
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import place_of
from tests.kernels.reference import layout_of, relative_error
from tests.ranks import run_ranks

RANKS, WIDTH, HEADS, HEAD, MLP, LENGTHS = 4, 12, 4, 4, 24, [5, 1, 6]
ROWS = sum(LENGTHS)
CONFIG = ModelConfig(
    vocab_size=1,
    width=WIDTH,
    layers=1,
    heads=HEADS,
    kv_heads=HEADS,
    head_width=HEAD,
    ffn_width=MLP,
    activation="gelu",
    biases="all",
)
State = dict[str, Tensor]


def new_state() -> State:
    """All parameters of the whole block, by the model's names; no bias is 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in ParallelBlock(CONFIG, None, Peers()).named_parameters()}
    noise = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: each * 0.3 if each.ndim == 2 else each + 0.5 for name, each in noise.items()}


def rows_and_gradient() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, dout


def plain_block(x: Tensor, state: State) -> Tensor:
    """x + attention(n) + mlp(n) + bias written out; nothing turns."""
    n = rms_norm(x, state["norm.weight"], CONFIG.norm_eps)
    q, k, v = (linear(n, state, f"attention.{name}").view(ROWS, -1, HEAD) for name in ("query", "key", "value"))
    heads = varlen_attention(q, k, v, layout_of(LENGTHS)).flatten(1)
    inner = functional.gelu(linear(n, state, "mlp.up"))
    branches = heads @ state["attention.output.weight"].T + inner @ state["mlp.down.weight"].T
    return x + branches + state["bias"]


def linear(n: Tensor, state: State, name: str) -> Tensor:
    return n @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def block(x: Tensor, state: State, peers: Peers) -> tuple[Tensor, ParallelBlock]:
    """What the trainer's block, with this peer's state, gives of this peer's rows."""
    module = ParallelBlock(CONFIG, None, peers).double()
    module.load_state_dict(state)
    cos, sin = torch.ones(ROWS, HEAD // 2), torch.zeros(ROWS, HEAD // 2)
    return module(x, cos, sin, layout_of(LENGTHS)), module


def own(peers: Peers) -> slice:
    rows = peers.rows(ROWS)
    return slice(peers.rank * rows, (peers.rank + 1) * rows)


def boxes(state: State, peers: Peers) -> dict[str, Box]:
    return {name: box_of(f"blocks.0.{name}", value.shape, peers.rank, peers.count) for name, value in state.items()}


def shard(state: State, peers: Peers) -> State:
    shapes = {name: each.shape for name, each in ParallelBlock(CONFIG, None, peers).named_parameters()}
    return {name: state[name][place_of(box.offsets, shapes[name])].clone() for name, box in boxes(state, peers).items()}


def joined(shards: list[State]) -> State:
    whole = {name: torch.empty_like(value) for name, value in new_state().items()}
    for rank, each in enumerate(shards):
        for name, box in boxes(whole, Peers(rank=rank, count=len(shards))).items():
            whole[name][place_of(box.offsets, each[name].shape)] = each[name]
    return whole


def run(x: Tensor, state: State, peers: Peers) -> list[tuple[Tensor, Tensor]]:
    """Pairs of found and wanted: this peer's rows of output and of the input's gradient, parameters' gradients."""
    dout = rows_and_gradient()[1]
    whole = {name: value.clone().requires_grad_() for name, value in state.items()}
    all_rows, rows = x.clone().requires_grad_(), x[own(peers)].clone().requires_grad_()
    expected = plain_block(all_rows, whole)
    dx, *dwhole = torch.autograd.grad(expected, (all_rows, *whole.values()), dout)
    out, module = block(rows, shard(state, peers), peers)
    named = dict(module.named_parameters())
    dfound, *gradients = torch.autograd.grad(out, (rows, *named.values()), dout[own(peers)])
    pairs = [(out, expected[own(peers)]), (dfound, dx[own(peers)])]
    wanted = dict(zip(whole, dwhole, strict=True))
    for name, gradient in zip(named, gradients, strict=True):
        box = boxes(state, peers)[name]
        if not box.divided and peers.count > 1:
            dist.all_reduce(gradient, group=peers.group)
        pairs.append((gradient, wanted[name][place_of(box.offsets, gradient.shape)]))
    return pairs


def with_the_bias_on_every_peer(state: State, peers: Peers) -> Tensor:
    """What a bias inside the sum is in the output."""
    return sum_linear((), (), peers, partial=state["bias"].expand(ROWS, WIDTH).contiguous())


def _on_a_rank(ranks: Ranks, folder: Path) -> dict[str, Any]:
    groups = {2: dist.new_group([0, 1]), RANKS: None}
    members = {count: Peers(group=group, rank=ranks.rank, count=count) for count, group in groups.items()}
    members = {count: peers for count, peers in members.items() if ranks.rank < count}
    state, (x, _) = new_state(), rows_and_gradient()
    found: dict[str, Any] = {
        "errors": {c: max(relative_error(*pair) for pair in run(x, state, peers)) for c, peers in members.items()}
    }
    if (two := members.get(2)) is not None:
        torch.save(shard(state, two), folder / f"{ranks.rank}.pt")
        excess = with_the_bias_on_every_peer(state, two) - state["bias"]
        found["excess"] = relative_error(excess, state["bias"].expand_as(excess))
    dist.barrier()
    loaded = joined([torch.load(folder / f"{i}.pt") for i in range(2)])
    four = members[RANKS]
    found["reloaded"] = [
        relative_error(block(x, loaded, Peers())[0], plain_block(x, state)),
        relative_error(block(x[own(four)], shard(loaded, four), four)[0], plain_block(x, state)[own(four)]),
    ]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_on_a_rank, RANKS, tmp_path_factory.mktemp("shards"))


def test_output_and_all_gradients_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    assert [sorted(rank["errors"]) for rank in found] == [[2, 4], [2, 4], [4], [4]]
    assert max(max(rank["errors"].values()) for rank in found) <= 1e-12
    x, _ = rows_and_gradient()
    assert max(relative_error(*pair) for pair in run(x, new_state(), Peers())) <= 1e-12


def test_shards_saved_at_two_load_at_one_and_four(found: list[dict[str, Any]]) -> None:
    assert all(max(rank["reloaded"]) <= 1e-14 for rank in found)


def test_a_bias_on_every_peer_is_once_too_often_at_two(found: list[dict[str, Any]]) -> None:
    assert max(rank["excess"] for rank in found[:2]) <= 1e-14
