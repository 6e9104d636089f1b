"""A mixture of experts against a loop over rows, divided over peers, and its choices moved by loads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.loss import UNSUPERVISED
from seqmesh.kernels.tensor_parallel import Peers
from seqmesh.trainer.models.balance import fullest, loads_size, move_biases_, take_loads
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.experts import Experts
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.recompute import Recompute, set_recompute
from seqmesh.trainer.replicas.filler import run_filler
from tests.kernels.reference import layout_of, positions_of, relative_error

CONFIG = ModelConfig(vocab_size=50, width=8, layers=1, heads=2, kv_heads=1, ffn_width=12, experts=4)
MODEL = replace(CONFIG, layers=2, init_std=0.3)
ALONE = Peers()
Activation = Literal["swiglu", "gelu"]
SIZES = st.tuples(st.integers(2, 6), st.lists(st.integers(1, 6), max_size=3), st.integers(0, 3))


def experts_of(config: ModelConfig, peers: Peers = ALONE, *, seed: int = 0) -> Experts:
    """With the whole model's weights, of which peers have their own."""
    experts = Experts(config, peers).double()
    generator = torch.Generator().manual_seed(seed)
    assert config.experts is not None
    with torch.no_grad():
        experts.balance.copy_(torch.randn(config.experts, generator=generator) / 10)
        for name, weight in experts.named_parameters():
            shape = (config.experts, *weight.shape[1:])
            whole = torch.randn(shape, generator=generator, dtype=torch.float64) / 3
            weight.copy_(whole if name.startswith("router") else whole[experts.own.start : experts.own.stop])
    return experts


def rows_of(count: int, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CONFIG.width, generator=generator, dtype=torch.float64).requires_grad_()


def slow(experts: Experts, n: Tensor, real: int) -> tuple[Tensor, list[list[int]]]:
    """Row by row, each through the two experts of highest probability and bias; and which those are."""
    out, chosen = [], []
    for row in n[:real]:
        probabilities = (experts.router.weight @ row).softmax(dim=0)
        biased = (probabilities + experts.balance).tolist()
        pair = sorted(range(len(biased)), key=lambda e: -biased[e])[:2]
        total = sum(probabilities[e] for e in pair)
        out.append(sum((probabilities[e] / total * _mlp(experts, e, row) for e in pair), torch.zeros_like(row)))
        chosen.append(pair)
    return torch.stack([*out, *(0 * n[real:])]), chosen


def _mlp(experts: Experts, expert: int, row: Tensor) -> Tensor:
    stacks = experts.experts
    up = stacks.up.weight[expert] @ row
    inner = functional.gelu(up) if stacks.gate is None else functional.silu(stacks.gate.weight[expert] @ row) * up
    return stacks.down.weight[expert] @ inner


def called(experts: Experts, n: Tensor, layout: Layout) -> Tensor:
    out: Tensor = experts(experts.router(n), n, layout)
    return out


def gradients(out: Tensor, n: Tensor, experts: Experts) -> list[Tensor]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    inputs = [n, *experts.parameters()]
    return list(torch.autograd.grad(out, inputs, dout, materialize_grads=True))


@given(SIZES, st.sampled_from(get_args(Activation)))
@settings(deadline=None, max_examples=40)
def test_every_row_goes_through_its_two_experts(sizes: tuple[int, list[int], int], activation: Activation) -> None:
    """Some experts have no rows, some passes none at all but padding."""
    number, lengths, padding = sizes
    experts = experts_of(replace(CONFIG, experts=number, activation=activation))
    n = rows_of(sum(lengths) + max(padding, not lengths))
    out, (expected, chosen) = called(experts, n, layout_of(lengths)), slow(experts, n, sum(lengths))
    for found, wanted in zip(
        (out, *gradients(out, n, experts)), (expected, *gradients(expected, n, experts)), strict=True
    ):
        assert relative_error(found, wanted) <= 1e-12 if wanted.any() else not found.any()
    assert experts.take_counts().tolist() == [sum(pair.count(e) for pair in chosen) for e in range(number)]
    assert not experts.counts.any()


@pytest.mark.parametrize("count", [2, 4])
def test_peers_give_parts_of_the_sum_and_of_gradients(count: int) -> None:
    whole, n, layout = experts_of(CONFIG), rows_of(21), layout_of([12, 7])
    expected = called(whole, n, layout)
    wanted = gradients(expected, n, whole)
    peers = [experts_of(CONFIG, Peers(rank=rank, count=count)) for rank in range(count)]
    outs = [called(peer, n, layout) for peer in peers]
    assert relative_error(torch.stack(outs).sum(dim=0), expected) <= 1e-12
    each = [gradients(out, n, peer) for out, peer in zip(outs, peers, strict=True)]
    dn, router, *stacked = (list(parts) for parts in zip(*each, strict=True))
    joined = [sum(dn), sum(router), *map(torch.cat, stacked)]
    for found, right in zip(joined, wanted, strict=True):
        assert relative_error(found, right) <= 1e-12
    first, *others = [peer.take_counts() for peer in peers]
    assert torch.equal(first, whole.take_counts())
    assert not torch.stack(others).any()


def model_of(recompute: Recompute = "none", **changes: Any) -> Transformer:
    model = Transformer(replace(MODEL, **changes), seed=0).double()
    set_recompute(model.blocks, recompute)
    return model


def run(model: Transformer, rows: int = 400, *, supervised: bool = True) -> None:
    """Forward and backward of a pack of two documents and padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(MODEL.vocab_size, (rows + 5,), generator=generator)
    lengths = [rows - 7, 7]
    loss, _ = model(ids, positions_of(lengths, 5), layout_of(lengths), ids if supervised else ids * 0 + UNSUPERVISED)
    torch.autograd.backward(loss)


def test_each_rows_choices_are_counted_once_however_often_a_layer_runs() -> None:
    plain = model_of()
    run(plain)
    loads = take_loads(plain)
    assert len(loads) == loads_size(MODEL)
    assert loads.view(MODEL.layers, -1).sum(dim=1).tolist() == [800, 800]  # padding is not counted
    assert not take_loads(plain).any()
    for recompute in get_args(Recompute):
        model = model_of(recompute)
        run(model, supervised=recompute == "none")  # what a plan packs with what decides nothing
        with torch.no_grad():
            model(torch.arange(5), positions_of([5]), layout_of([5]))
        run_filler(model, torch.device("cpu"))
        assert torch.equal(take_loads(model), loads)


def test_biases_even_the_loads_out_and_leave_the_shares_alone() -> None:
    model, spreads = model_of(balance_rate=0.004), []
    experts = model.blocks[0].mlp
    assert isinstance(experts, Experts)
    experts.balance.copy_(torch.tensor([0.1, -0.1, 0.0, 0.0]))
    for _ in range(30):
        run(model)
        loads = take_loads(model)
        spreads.append(loads.max() / loads.mean())
        move_biases_(model, loads.tolist())
        assert fullest(loads.tolist(), model.config) == max(each.max() / each.mean() for each in loads.view(2, 4))
    assert spreads[0] > 1.25
    assert max(spreads[-5:]) < 1.1
    before = experts.balance.clone()
    move_biases_(model, [5.0, 5.0, 7.0, 3.0] * 2)
    assert torch.allclose(experts.balance - before, torch.tensor([0.0, 0.0, -0.004, 0.004], dtype=torch.float64))
    n = rows_of(1)
    experts.balance.copy_(torch.tensor([0.0, 9.0, 9.0, 0.0]))  # whatever it decides, weights are of probabilities
    assert relative_error(called(experts, n, layout_of([1])), slow(experts, n, 1)[0]) <= 1e-12


def test_a_part_of_a_model_speaks_for_its_own_layers() -> None:
    whole, last = model_of(), Transformer(MODEL, seed=0, layers=[range(1, 2)]).double()
    run(whole)
    x = torch.randn(9, MODEL.width, dtype=torch.float64)
    loss, _ = last(x, positions_of([9]), layout_of([9]), torch.arange(9))
    torch.autograd.backward(loss)
    loads = take_loads(last).view(2, -1)
    assert loads.sum(dim=1).tolist() == [0, 18]
    move_biases_(whole, loads.flatten().tolist())
    move_biases_(last, loads.flatten().tolist())
    names = dict(last.named_buffers()).keys()
    assert "blocks.1.mlp.balance" in names
    assert {name for name in last.state_dict() if "balance" in name or "counts" in name} == {"blocks.1.mlp.balance"}
    assert torch.equal(last.blocks[1].mlp.balance, whole.blocks[1].mlp.balance)  # type: ignore[arg-type]
