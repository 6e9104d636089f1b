"""Activations that are moved to the host and back: the same gradient to the bit, exact bytes, less memory."""

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seqmesh.kernels.layout import Layout
from seqmesh.kernels.rotary import rotary_tables
from seqmesh.packer.offload import KEPT_LAYERS, WHOLE, memory_tokens
from seqmesh.trainer import offload as module
from seqmesh.trainer.activations import Activations, bytes_per_token, saved_bytes
from seqmesh.trainer.config import load_config
from seqmesh.trainer.host import Host, HostPool, PromptLane, buffer_size
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.offload import Offloader, offload, offloaded
from seqmesh.trainer.recompute import Recompute, set_recompute
from seqmesh.trainer.train import train
from tests.jobs import VOCAB, logged, write_job
from tests.lanes import LateLane, LiveBytes, late_host
from tests.support import long_tail, make_set

CONFIG = ModelConfig(vocab_size=50, width=16, layers=5, heads=4, kv_heads=2, init_std=0.2)
MOVED_LAYERS = CONFIG.layers - KEPT_LAYERS
LENGTHS = (23, 0, 31, 7)
RATIOS = (1 / WHOLE, round(WHOLE / 3) / WHOLE, 1.0)
CPU = torch.device("cpu")


def model_of(recompute: Recompute = "none", config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config, seed=0).double()
    set_recompute(model.blocks, recompute)
    return model


def inputs(lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, Tensor, Layout, Tensor]:
    ids = torch.randint(CONFIG.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ids, positions, Layout(bounds, max(lengths)), ids.roll(1)


def gradients(model: nn.Module, offloader: Offloader | None, ratios: Sequence[float]) -> list[Tensor]:
    """One gradient for micro-batches of these ratios, each of other lengths."""
    model.zero_grad()
    for number, ratio in enumerate(ratios):
        with offloaded(offloader, ratio):
            loss, _ = model(*inputs([n + 3 * number for n in LENGTHS]))
            torch.autograd.backward(loss)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("host", [Host.of(CPU), late_host()], ids=["prompt", "late"])
def test_gradients_are_the_same_to_the_bit(recompute: Recompute, host: Host) -> None:
    expected = {count: gradients(model_of(), None, [0.0] * count) for count in (1, 3)}
    model = model_of(recompute)
    offloader = Offloader(model.blocks, host)
    for ratios in [(ratio,) for ratio in RATIOS] + [(0.25, 0.0, 1.0)]:
        found = gradients(model, offloader, ratios)
        assert all(map(torch.equal, found, expected[len(ratios)]))


@pytest.mark.parametrize(
    "shape",
    [
        {"block": "serial", "windows": (9, None)},
        {"block": "serial", "norm": "layer", "activation": "gelu", "biases": "all"},
        {"norm": "layer", "activation": "gelu", "biases": "qkv"},
        {"experts": 3},
    ],
)
def test_every_kind_of_block_is_offloaded_and_made_again(shape: dict[str, Any]) -> None:
    config = replace(CONFIG, **shape)
    expected = gradients(model_of(config=config), None, [0.0, 0.0])
    for recompute in get_args(Recompute):
        model = model_of(recompute, config)
        offloader = Offloader(model.blocks, late_host())
        assert all(map(torch.equal, gradients(model, offloader, [0.25, 1.0]), expected))
        assert offloader.moved.nbytes > 0
        assert bytes_per_token(config, recompute, torch.float64) == bytes_of_a_token_in(model, config)


def bytes_of_a_token_in(model: Transformer, config: ModelConfig) -> float:
    """As all layers save them when they run, with so many tokens that nothing is small."""
    tokens = 257
    x, positions = torch.randn(tokens, config.width, dtype=torch.float64), torch.arange(tokens)
    tables = rotary_tables(positions, config.head_dim, config.rope_base, torch.float64)
    layout = Layout(torch.tensor([0, tokens], dtype=torch.int32), tokens)
    return sum(saved_bytes(block, x, *tables, layout) for block in model.blocks) / tokens


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_what_moves_is_gone_from_the_device_exactly_and_never_more_than_the_plan_counts(
    recompute: Recompute, ratio: float
) -> None:
    def run(ratio: float) -> tuple[int, int, Offloader, Host]:
        """Live bytes between forward and backward, and the most at any time, all without the host's."""
        model, host = model_of(recompute), Host.of(CPU)
        offloader = Offloader(model.blocks, host)
        gradients(model, offloader, [ratio])  # gradients and the host's pool are there from now on
        offloader.moved.nbytes = offloader.moved.tensors = 0
        ids = inputs()
        with LiveBytes() as live, offloaded(offloader, ratio):
            loss, _ = model(*ids)
            between = live.now
            torch.autograd.backward(loss)
        return between, live.peak, offloader, host

    whole, whole_peak, still, _ = run(0.0)
    kept, peak, offloader, _ = run(ratio)
    assert still.moved.nbytes == 0
    rows = sum(LENGTHS)
    leaving = math.ceil(rows * ratio)
    moved = MOVED_LAYERS * layer_bytes(recompute, rows) * leaving // rows
    assert offloader.moved.nbytes == moved
    all_layers = CONFIG.layers * layer_bytes(recompute, rows)
    counted = memory_tokens(np.array([rows]), np.array([int(ratio * WHOLE)]), CONFIG.layers)[0]
    assert (all_layers - moved) * rows <= counted * all_layers
    assert whole - kept == moved
    if recompute == "none":  # else what is made again for one layer is the most
        assert whole_peak - peak == moved
    assert peak <= whole_peak


def layer_bytes(recompute: Recompute, rows: int, config: ModelConfig = CONFIG) -> int:
    """By hand: the input, and its norm before and after the weight; q, k, v, out and the log-sum-exp of every head;
    gate, up and their product. All float64."""
    width, kv = config.width, config.kv_heads * config.head_dim
    kept = {"none": 5 * width + 2 * kv + 3 * config.mlp_width, "selective": 2 * width, "full": width}[recompute]
    statistics = config.heads * (recompute != "full")
    return 8 * rows * (kept + statistics)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_a_layer_saves_is_counted(recompute: Recompute) -> None:
    """For the plan on the meta device, and as the layer does when it runs."""
    inverse_root = 8 * (recompute == "none")  # of the norm: with many tokens it is not small
    per_token = (layer_bytes(recompute, 1) + inverse_root) * CONFIG.layers
    assert bytes_per_token(CONFIG, recompute, torch.float64) == per_token
    layer = model_of(recompute).blocks[0]
    rows = sum(LENGTHS)
    tables = rotary_tables(inputs()[1], CONFIG.head_dim, CONFIG.rope_base, torch.float64)
    assert saved_bytes(layer, torch.randn(rows, CONFIG.width, dtype=torch.float64), *tables, inputs()[2]) == (
        layer_bytes(recompute, rows)
    )


def test_weights_stay_also_where_they_have_as_many_rows_as_there_are_tokens() -> None:
    model = model_of()
    offloader = Offloader(model.blocks, Host.of(CPU))
    with offloaded(offloader, 1.0):
        loss, _ = model(*inputs([CONFIG.width]))
        torch.autograd.backward(loss)
    statistics = 8 * CONFIG.width * CONFIG.heads  # too small to move
    assert offloader.moved.nbytes == MOVED_LAYERS * (layer_bytes("none", CONFIG.width) - statistics)


def test_activations_are_known_by_storage_and_form() -> None:
    """A matrix and its transpose begin at the same address; two layers' tensors may, one after the other."""
    square = torch.randn(32, 32)
    found = Activations([32], [])
    views = [square, square.T, square.view(32, 4, 8), square.to(torch.float64), square.clone()]
    keys = [activation.key for view in views if (activation := found.find(view)) is not None]
    assert keys[0] == keys[2]
    assert len(set(keys)) == 4
    weight = nn.Linear(32, 32).weight
    finder = Activations([32], [weight, {"tables": (square,)}])
    assert finder.find(weight.t()) is None
    assert finder.find(square[:, :16]) is None
    assert finder.find(torch.zeros(32, 32, dtype=torch.int64)) is None
    assert finder.find(torch.randn(31, 64)) is None
    rows = finder.find(torch.randn(8, 32))  # rows may be the second dimension
    assert rows is not None
    assert rows.dim == 1


class Strange(nn.Module):
    """Saves views of one storage with equal addresses and shapes, one of them with gaps, and one tensor twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 2 * width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        both = x @ self.weight
        left, right = both.chunk(2, dim=1)
        return (left * right) @ left.T.contiguous() * (left * left) @ right.exp() / 100 + x.T @ x


def test_views_with_gaps_and_transposes_come_back_as_they_were() -> None:
    def run(ratio: float, host: Host) -> list[Tensor]:
        layers = [Strange(32) for _ in range(4)]
        for seed, layer in enumerate(layers):
            layer.weight.data = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).double() / 8
        offloader = Offloader(layers, host)
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(9)).double().requires_grad_()
        with offloaded(offloader, ratio):
            y = x * 1.0
            for layer in layers:
                y = torch.tanh(layer(y))
            torch.autograd.backward(y.sum())
        assert x.grad is not None
        return [x.grad, *(p.grad for layer in layers for p in layer.parameters() if p.grad is not None)]

    for ratio in RATIOS:
        assert all(map(torch.equal, run(ratio, late_host()), run(0.0, Host.of(CPU))))


class Noted(nn.Module):
    """Says when its backward runs."""

    def __init__(self, name: int, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.register_hook(lambda _gradient: self.log.append(f"backward {self.name}"))  # type: ignore[no-untyped-call]
        return y * 0.5


def test_copies_back_begin_when_the_layer_above_begins_its_backward() -> None:
    class NotedLane(PromptLane):
        def copy(self, target: Tensor, source: Tensor) -> None:
            log.append(f"back {int(source[0, 0])}")
            super().copy(target, source)

    log: list[str] = []
    offloader = Offloader(
        [Noted(number, log) for number in range(5)], Host(HostPool(pinned=False), PromptLane(), NotedLane())
    )
    x = torch.full((64, 8), 1.0, requires_grad=True)
    with offloaded(offloader, 1.0):
        y = x * 1.0
        for layer in offloader._layers:
            y = layer(y).log().add(1 + math.log(2))  # the activation of layer n is exp(n + 1), about
        torch.autograd.backward(y.sum())
    assert [line.split()[0] for line in log] == ["backward", *["back", "backward"] * 3, "backward"]
    assert [int(line.split()[1]) for line in log] == [4, 20, 3, 7, 2, 2, 1, 0]


def test_a_ratio_of_nothing_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "saved_tensors_hooks", None)
    model, host = model_of(), Host.of(CPU)
    gradients(model, Offloader(model.blocks, host), [0.0])
    assert host.pool.nbytes == 0
    with offloaded(None, 0.0):
        pass
    with pytest.raises(ValueError, match=r"offload_ratio is 0\.5: the plan counts on offload"), offloaded(None, 0.5):
        pass


@pytest.mark.parametrize("lane", [PromptLane, LateLane])
def test_buffers_come_back_also_without_a_backward(lane: Any) -> None:
    model, host = model_of(), Host(HostPool(pinned=False), lane(), lane())
    offloader = Offloader(model.blocks, host)
    expected = gradients(model, None, [0.0])
    gradients(model, offloader, [1.0])
    size = host.pool.nbytes
    for _ in range(2):
        with pytest.raises(KeyError), offloaded(offloader, 1.0):
            model(*inputs())
            raise KeyError
        assert all(map(torch.equal, gradients(model, offloader, [1.0]), expected))
    with torch.no_grad(), offloaded(offloader, 1.0):
        model(*inputs())
    assert host.pool.nbytes == size


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("lane", [PromptLane, LateLane])
def test_micro_batches_in_flight_together_are_all_on_the_host_in_every_layer(recompute: Recompute, lane: Any) -> None:
    """As on a stage of a pipeline: others come between a forward and its backward."""
    ratios = [0.5, 0.0, 1.0, 0.25]

    def run(offloader: Offloader | None) -> tuple[list[Tensor], list[int]]:
        model.zero_grad()
        flying, between = {}, []
        with LiveBytes() as live:
            for number in (0, 1, ~0, 2, ~1, 3, ~2, ~3):
                if number >= 0:
                    one = offload(offloader, ratios[number] if offloader else 0.0, at_once=False)
                    with one.forward():
                        flying[number] = one, model(*inputs([n + 3 * number for n in LENGTHS]))[0]
                else:
                    one, loss = flying.pop(~number)
                    with one.backward():
                        torch.autograd.backward(loss)
                    del loss
                if offloader is not None:
                    offloader.let_go()
                between.append(live.now)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], between

    model, host = model_of(recompute), Host(HostPool(pinned=False), lane(), lane())
    gradients(model, None, [0.0])  # they are there from now on
    expected, whole = run(None)
    offloader = Offloader(model.blocks, host)
    run(offloader)  # and so is the host's memory
    found, between = run(offloader)
    assert all(map(torch.equal, found, expected))
    if lane is LateLane:  # it keeps what it has copied
        return
    rows = [sum(n + 3 * number for n in LENGTHS) for number in range(4)]
    gone = [
        layer_bytes(recompute, n) * CONFIG.layers * math.ceil(n * ratio) // n
        for n, ratio in zip(rows, ratios, strict=True)
    ]
    flights = [{0}, {0, 1}, {1}, {1, 2}, {2}, {2, 3}, {3}, set[int]()]
    assert [a - b for a, b in zip(whole, between, strict=True)] == [sum(gone[n] for n in each) for each in flights]


def test_nothing_is_left_when_a_micro_batch_is_over() -> None:
    """No cycle holds activations until the garbage collector comes."""
    model, host = model_of(), Host.of(CPU)
    offloader = Offloader(model.blocks, host)
    gradients(model, offloader, [0.5])
    gc.disable()
    try:
        ids = inputs()
        with LiveBytes() as live:
            with offloaded(offloader, 0.5):
                loss, _ = model(*ids)
                torch.autograd.backward(loss)
            del loss, _
            assert live.now == 0
    finally:
        gc.enable()


def test_an_activation_that_is_changed_after_it_was_saved_is_found() -> None:
    class Careless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            y.mul_(2.0)
            return y * 1.0

    offloader = Offloader([Careless() for _ in range(3)], Host.of(CPU))
    x = torch.zeros(64, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"shape \[64, 8\] was changed in place"), offloaded(offloader, 1.0):
        for layer in offloader._layers:
            x = layer(x)


def test_the_pool_uses_buffers_again_after_their_last_copy() -> None:
    pool, first, second = HostPool(pinned=False), LateLane(), LateLane()
    buffer = pool.take(1000, first)
    buffer.fill_(1)
    target, fresh = torch.zeros_like(buffer), torch.full_like(buffer, 2)
    second.copy(target, buffer)
    pool.give(buffer, second.mark())
    assert pool.take(1001, first) is buffer
    first.copy(buffer, fresh)
    first.wait(first.mark())
    assert target.tolist() == [1] * len(buffer)  # it was read before it was written again
    assert pool.nbytes == len(buffer) == 1024
    for size in (1, 511, 512, 5000, 1 << 20, (1 << 20) + 1, 10**9):
        assert size <= buffer_size(size) <= max(512, size * 9 // 8 + 512)


def test_a_job_over_the_capacity_trains_as_one_with_room(tmp_path: Path) -> None:
    """From the configuration to the weights: the plan offloads, the layers do."""
    data = make_set(tmp_path / "set", long_tail(40, 60), vocab=VOCAB)
    model = {"vocab_size": VOCAB, "width": 16, "layers": 4, "heads": 2, "kv_heads": 1}
    losses, moved = [], []
    for name, capacity, overrides in (
        ("room", 60, []),
        ("offloaded", 34, ["offload={bandwidth: 1.0e12, flops: 1.0e6}", "recompute=selective"]),
    ):
        (tmp_path / name).mkdir()
        loader = {"data": str(data), "tokens_per_step": 128, "capacity": capacity, "max_document": 60, "seed": 5}
        job = write_job(tmp_path / name, data, ranks=1, steps=4, model=model, dtype="float64", loader=loader)
        said: list[str] = []
        assert train(load_config(job, overrides), say=said.append) == 4
        losses.append([record["loss"] for record in logged(job).values()])
        moved.append([record["offload_bytes"] > 0 for record in logged(job).values()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert moved[0] == [False] * 4
    assert sum(moved[1]) > 1
    with pytest.raises(ValueError, match="max_document is 60: 1 ranks of 34 tokens hold 34; use"):
        train(load_config(job))
