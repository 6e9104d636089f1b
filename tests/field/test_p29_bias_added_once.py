"""A bias that every shard holds is added once: a parallel block over 1, 2 and 4 ranks is the block of one rank."""

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
from seqmesh.kernels.tensor_parallel import share_input, sum_partials
from seqmesh.trainer.models.blocks import ParallelBlock
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.parallel import Ranks
from tests.kernels.reference import layout_of, relative_error
from tests.ranks import run_ranks

RANKS, WIDTH, HEADS, HEAD, MLP, LENGTHS = 4, 12, 4, 4, 24, [5, 1, 3]
# Of each parameter the dimension that is divided over the ranks; None: every rank holds it whole.
DIVIDED = {
    "norm": None,
    **{f"{name}.weight": 0 for name in ("query", "key", "value", "up")},
    **{f"{name}.bias": 0 for name in ("query", "key", "value", "up")},
    "output.weight": 1,
    "down.weight": 1,
    "output.bias": None,
    "down.bias": None,
}
State = dict[str, Tensor]


def new_state() -> State:
    """All parameters of the whole block; no bias is 0."""
    generator = torch.Generator().manual_seed(0)
    inner = HEADS * HEAD
    shapes = dict.fromkeys(("query", "key", "value"), (inner, WIDTH))
    shapes |= {"up": (MLP, WIDTH), "output": (WIDTH, inner), "down": (WIDTH, MLP)}
    state = {"norm": torch.rand(WIDTH, generator=generator, dtype=torch.float64) + 0.5}
    for name, shape in shapes.items():
        state[f"{name}.weight"] = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
        state[f"{name}.bias"] = torch.randn(shape[0], generator=generator, dtype=torch.float64) + 0.5
    return state


def rows_and_gradient() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, sum(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    return x, dout


def partial_block(n: Tensor, state: State) -> Tensor:
    """attention(n) + mlp(n) of the heads and MLP width in `state`, the output's biases left out."""
    q, k, v = (
        functional.linear(n, state[f"{name}.weight"], state[f"{name}.bias"]).view(len(n), -1, HEAD)
        for name in ("query", "key", "value")
    )
    attended = varlen_attention(q, k, v, layout_of(LENGTHS)).flatten(1)
    inner = functional.gelu(functional.linear(n, state["up.weight"], state["up.bias"]))
    return functional.linear(attended, state["output.weight"]) + functional.linear(inner, state["down.weight"])


def block(x: Tensor, state: State, group: dist.ProcessGroup | None) -> Tensor:
    """x + attention(n) + mlp(n); over a group, or whole without one."""
    n, bias = rms_norm(x, state["norm"], 1e-5), state["output.bias"] + state["down.bias"]
    if group is None:
        return x + (partial_block(n, state) + bias)
    return x + sum_partials(partial_block(share_input(n, group), state), bias, group)


def block_with_bias_on_every_shard(x: Tensor, state: State, group: dist.ProcessGroup) -> Tensor:
    partial = partial_block(rms_norm(x, state["norm"], 1e-5), state) + state["output.bias"] + state["down.bias"]
    return x + sum_partials(partial, None, group)


def trainers_block(state: State) -> ParallelBlock:
    """The module of the trainer's models with these parameters."""
    config = ModelConfig(
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
    module = ParallelBlock(config, None).double()
    names = {name: f"{'mlp' if name.startswith(('up', 'down')) else 'attention'}.{name}" for name in state}
    own = {names[name]: value for name, value in state.items()}
    own["norm.weight"] = own.pop("attention.norm")
    own["bias"] = own.pop("attention.output.bias") + own.pop("mlp.down.bias")
    module.load_state_dict(own)
    return module


def shard(state: State, index: int, count: int) -> State:
    return {
        name: whole if (dim := DIVIDED[name]) is None else whole.chunk(count, dim)[index].clone()
        for name, whole in state.items()
    }


def joined(shards: list[State]) -> State:
    return {
        name: shards[0][name] if (dim := DIVIDED[name]) is None else torch.cat([each[name] for each in shards], dim)
        for name in DIVIDED
    }


def run(x: Tensor, state: State, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, State]:
    """Output, the input's gradient, those of the parameters."""
    x, state = x.clone().requires_grad_(), {name: value.clone().requires_grad_() for name, value in state.items()}
    out = block(x, state, group)
    dx, *gradients = torch.autograd.grad(out, (x, *state.values()), rows_and_gradient()[1])
    return out.detach(), dx, dict(zip(state, gradients, strict=True))


def _on_a_rank(ranks: Ranks, folder: Path) -> dict[str, Any]:
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, RANKS)}
    state, (x, _) = new_state(), rows_and_gradient()
    whole, dwhole, dstate = run(x, state, None)
    found: dict[str, Any] = {"errors": [], "reloaded": {}}
    for count, group in groups.items():
        if ranks.rank < count:
            out, dx, gradients = run(x, shard(state, ranks.rank, count), group)
            own = shard(dstate, ranks.rank, count)
            pairs = [(out, whole), (dx, dwhole), *((gradients[name], own[name]) for name in DIVIDED)]
            found["errors"].append(max(relative_error(got, want) for got, want in pairs))
    if ranks.rank < 2:
        torch.save(shard(state, ranks.rank, 2), folder / f"{ranks.rank}.pt")
        found["saved"] = block(x, shard(state, ranks.rank, 2), groups[2]).tolist()
        excess = block_with_bias_on_every_shard(x, shard(state, ranks.rank, 2), groups[2]) - whole
        found["excess"] = relative_error(excess, (state["output.bias"] + state["down.bias"]).expand_as(excess))
    dist.barrier()
    loaded = joined([torch.load(folder / f"{i}.pt") for i in range(2)])
    for count in (1, RANKS):
        if ranks.rank < count:
            found["reloaded"][count] = block(x, shard(loaded, ranks.rank, count), groups[count]).tolist()
    return found


def exactly(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_on_a_rank, RANKS, tmp_path_factory.mktemp("shards"))


def test_output_and_all_gradients_are_those_of_one_rank(found: list[dict[str, Any]]) -> None:
    assert [len(rank["errors"]) for rank in found] == [3, 2, 1, 1]
    assert max(max(rank["errors"]) for rank in found) <= 1e-12


def test_the_trainers_block_adds_its_bias_after_the_sum() -> None:
    state, (x, _) = new_state(), rows_and_gradient()
    cos, sin = torch.ones(len(x), HEAD // 2), torch.zeros(len(x), HEAD // 2)  # nothing turns
    out = trainers_block(state)(x, cos, sin, layout_of(LENGTHS))
    assert relative_error(out, block(x, state, None)) <= 1e-14


def test_shards_saved_at_two_load_at_one_and_four(found: list[dict[str, Any]]) -> None:
    saved = found[0]["saved"]
    assert saved == found[1]["saved"]
    for rank in found:
        for out in rank["reloaded"].values():
            assert relative_error(exactly(out), exactly(saved)) <= 1e-14
    assert [sorted(rank["reloaded"]) for rank in found] == [[1, 4], [4], [4], [4]]


def test_a_bias_on_every_shard_is_once_too_often_at_two(found: list[dict[str, Any]]) -> None:
    assert max(rank["excess"] for rank in found[:2]) <= 1e-14
