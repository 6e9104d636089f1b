"""A model that peers divide gives the loss, the logits and the gradients of one that nobody divides, and exchanges no
more than one gather and one reduce-scatter for a parallel block, forward and again backward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqmesh.kernels.loss import UNSUPERVISED
from seqmesh.kernels.rotary import rotary_tables
from seqmesh.kernels.tensor_parallel import Peers
from seqmesh.trainer.activations import bytes_per_token, saved_bytes
from seqmesh.trainer.host import Host
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import first_of, layers_of
from seqmesh.trainer.models.transformer import Transformer, parts_of
from seqmesh.trainer.offload import Offloader, offloaded
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import place_of
from seqmesh.trainer.recompute import Recompute, set_recompute
from tests.kernels.reference import layout_of, positions_of, relative_error
from tests.ranks import run_ranks

RANKS, LAYERS, WIDTH = 4, 4, 16
ROWS = 267  # of a peer, whole chunks of three, unlike any other dimension
PARALLEL = ModelConfig(vocab_size=37, width=WIDTH, layers=LAYERS, heads=4, kv_heads=4, ffn_width=24, init_std=0.2)
SERIAL = replace(PARALLEL, block="serial", norm="layer", activation="gelu", biases="all", windows=(4, None))
TIED = replace(PARALLEL, norm="layer", biases="all", tied_embeddings=True, windows=(None, 6), head_width=6)
EXPERTS = replace(PARALLEL, experts=8, ffn_width=9)
GATHER, SUM, STATISTICS = "_allgather_base_", "_reduce_scatter_base_", "allgather_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: ModelConfig
    count: int
    chunks: int = 1
    lengths: tuple[int, ...] = (7, 1, 9)
    padding: int = 0

    @property
    def packed(self) -> int:
        """Rows once they are padded inside the model."""
        each = self.count * self.chunks
        return -(-(sum(self.lengths) + self.padding) // each) * each


CASES = {
    "parallel, 2 peers": Case(config=PARALLEL, count=2),
    "parallel, 4 peers, 3 chunks": Case(config=PARALLEL, count=4, chunks=3),
    "serial, all biases, 2 peers, 3 chunks, padded": Case(config=SERIAL, count=2, chunks=3, padding=2),
    "serial, all biases, 4 peers": Case(config=SERIAL, count=4, lengths=(16, 8)),
    "tied, all biases, 4 peers": Case(config=TIED, count=4),
    "tied, all biases, 2 peers, 3 chunks": Case(config=TIED, count=2, chunks=3, lengths=(12,)),
    "experts, 2 peers, 3 chunks, padded": Case(config=EXPERTS, count=2, chunks=3, padding=2),
    "experts, 4 peers": Case(config=replace(EXPERTS, block="serial", activation="gelu"), count=4),
    "one row, 4 peers, 3 chunks": Case(config=TIED, count=4, chunks=3, lengths=(1,)),
}
EXACT = (
    "parallel, 2 peers",
    "serial, all biases, 2 peers, 3 chunks, padded",
    "experts, 2 peers, 3 chunks, padded",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """errors: of loss, logits and each gradient. calls: collectives by name, with the elements of the larger side."""

    errors: dict[str, float]
    calls: list[tuple[str, int]]


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is not typed
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [each.numel() for each in args if isinstance(each, Tensor)]
            self.calls.append((func._opname, max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


def model_of(config: ModelConfig, peers: Peers = Peers()) -> Transformer:  # noqa: B008 -- frozen
    """In float64, with biases and norms that are not 0 and 1, the same numbers whatever the division."""
    model = Transformer(config, seed=0, peers=peers).double()
    for number, part in enumerate(parts_of(model).values()):
        if part.local.ndim == 1:
            noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(number)).double()
            part.local.add_(0.3 * noise[part.place])
    return model


def batch_of(case: Case) -> tuple[Any, ...]:
    """ids, positions, layout, labels."""
    generator, rows = torch.Generator().manual_seed(1), sum(case.lengths) + case.padding
    ids, labels = torch.randint(case.config.vocab_size, (2, rows), generator=generator, dtype=torch.int32)
    labels[:1] = labels[sum(case.lengths) :] = UNSUPERVISED
    return ids, positions_of(case.lengths, case.padding), layout_of(case.lengths), labels


def take(model: Transformer, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients here."""
    loss, _ = model(*batch_of(case))
    named = dict(model.named_parameters())
    return loss.detach(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def compared(case: Case, peers: Peers) -> Found:
    whole, model = model_of(case.config), model_of(case.config, peers)
    with Recorder() as recorder:
        loss, gradients = take(model, case)
    wanted, expected = take(whole, case)
    errors = {"loss": relative_error(loss, wanted)}
    for name, box in model.boxes().items():
        if not box.divided:
            dist.all_reduce(gradients[name], group=peers.group)
        here = expected[name][place_of(box.offsets, gradients[name].shape)]
        # A key's bias moves all scores of a row alike where no position turns it: next to nothing is left of it.
        errors[name] = float((gradients[name] - here).norm() / max(1.0, float(expected[name].norm())))
    vocabulary = range(case.config.vocab_size)[first_of(case.config.vocab_size, peers.rank, peers.count) :]
    logits, all_logits = (each(*batch_of(case)[:3]) for each in (model, whole))
    errors["logits"] = relative_error(logits, all_logits[:, vocabulary.start : vocabulary.start + logits.shape[1]])
    return Found(errors=errors, calls=recorder.calls)


def exact(case: Case, peers: Peers) -> bool:
    """Whether recompute and offload change no bit."""
    plain = take(model_of(case.config, peers), case)[1]
    return all(same(plain, saving(case, peers, recompute, ratio)) for recompute, ratio in SAVINGS)


SAVINGS: tuple[tuple[Recompute, float], ...] = (("full", 0.0), ("selective", 0.0), ("none", 0.6), ("selective", 0.6))


def saving(case: Case, peers: Peers, recompute: Recompute, ratio: float) -> dict[str, Tensor]:
    model = model_of(case.config, peers)
    set_recompute(model.blocks, recompute)
    offloader = Offloader(model.blocks, Host.of(torch.device("cpu")))
    with offloaded(offloader, ratio):
        gradients = take(model, case)[1]
    assert ratio == 0 or offloader.moved.tensors
    return gradients


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def counted(config: ModelConfig, recompute: Recompute, peers: Peers) -> bool:
    """Whether a token's bytes are counted as a layer saves them, with so many rows that nothing is small; on all peers
    together, since experts may be chosen unevenly."""
    config, rows = replace(config, layers=1, windows=(None,)), ROWS * peers.count
    layer = model_of(config, peers).blocks[0]
    set_recompute([layer], recompute)
    tables = rotary_tables(torch.arange(rows), config.head_dim, config.rope_base, torch.float64)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(peers.rank), dtype=torch.float64)
    found = torch.tensor(saved_bytes(layer, x, *tables, layout_of([rows])))
    dist.all_reduce(found, group=peers.group)
    expected = peers.count * rows * bytes_per_token(config, recompute, torch.float64, peers.count)
    return int(found) == expected


def work(ranks: Ranks) -> tuple[dict[str, Found], dict[str, bool]]:
    groups = {2: dist.new_group([0, 1]), 4: None}
    found, unchanged = {}, {}
    for name, case in CASES.items():
        if ranks.rank < case.count:
            peers = Peers(group=groups[case.count], rank=ranks.rank, count=case.count, chunks=case.chunks)
            found[name] = compared(case, peers)
            if name in EXACT:
                unchanged[name] = exact(case, peers)
                unchanged[f"{name}, bytes"] = all(counted(case.config, how, peers) for how in get_args(Recompute))
    return found, unchanged


@pytest.fixture(scope="module")
def results() -> list[tuple[dict[str, Found], dict[str, bool]]]:
    return run_ranks(work, RANKS)


def test_loss_logits_and_gradients_are_those_of_the_undivided_model(results: list[Any]) -> None:
    worst = {
        name: max(
            (error, rank, what)
            for rank, (found, _) in enumerate(results)
            if name in found
            for what, error in found[name].errors.items()
        )
        for name in CASES
    }
    assert all(error <= 1e-12 for error, _, _ in worst.values()), worst
    assert [len(found) for found, _ in results] == [9, 9, 5, 5]


@pytest.mark.parametrize("name", CASES)
def test_a_parallel_block_exchanges_half_of_what_a_serial_one_does(results: list[Any], name: str) -> None:
    """Of 4 layers 8 gathers and reduce-scatters forward and 8 backward, or 16 and 16."""
    case = CASES[name]
    exchanges = (1 if case.config.block == "parallel" else 2) * LAYERS
    block = [GATHER] * case.chunks + [SUM] * case.chunks
    forward = [SUM] * case.chunks + exchanges * block + [GATHER] * case.chunks
    for found, _ in results[: case.count]:
        calls = [call for call in found[name].calls if call[0] != STATISTICS]
        assert [call for call, _ in calls] == forward + forward[::-1][:0] + backward_of(forward)
        assert {size for _, size in calls} == {case.packed * WIDTH // case.chunks}
        # The loss: whether all have the same rows, and one chunk of them; the first row has no label.
        assert len(found[name].calls) - len(calls) == 1 + (sum(case.lengths) > 1)


def backward_of(forward: list[str]) -> list[str]:
    """The other way round, each exchange the other one."""
    return [GATHER if call == SUM else SUM for call in reversed(forward)]


def test_recompute_and_offload_change_no_bit_under_peers_and_bytes_are_counted(results: list[Any]) -> None:
    names = [name + what for name in EXACT for what in ("", ", bytes")]
    assert [unchanged for _, unchanged in results] == [dict.fromkeys(names, True)] * 2 + [{}] * 2


@pytest.mark.parametrize("config", [PARALLEL, SERIAL, TIED, EXPERTS], ids=["parallel", "serial", "tied", "experts"])
def test_every_piece_has_the_numbers_of_the_whole_model(config: ModelConfig) -> None:
    whole = dict(Transformer(config, seed=5).named_parameters())
    seen = {name: torch.zeros_like(weight) for name, weight in whole.items()}
    for layers in layers_of(LAYERS, 3):
        for rank in range(4):
            model = Transformer(config, seed=5, layers=[layers], peers=Peers(rank=rank, count=4))
            named = dict(model.named_parameters())
            boxes = model.boxes()
            assert list(boxes) == [name for name in whole if name in named]
            for name, box in boxes.items():
                place = place_of(box.offsets, named[name].shape)
                assert torch.equal(named[name], whole[name][place]), name
                assert box.divided == (named[name].shape != whole[name].shape)
                seen[name][place] += 1 if box.divided else 0.25
    twice = {"embedding.weight"} if config.tied_embeddings else set()
    assert all(bool((count == (2 if name in twice else 1)).all()) for name, count in seen.items())


@pytest.mark.parametrize(("stages", "parts"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("config", [PARALLEL, TIED, EXPERTS], ids=["untied", "tied", "experts"])
def test_stages_one_after_the_other_are_the_whole_model(config: ModelConfig, stages: int, parts: int) -> None:
    case = Case(config=config, count=1, padding=1)
    layers = layers_of(LAYERS, stages * parts)
    models = [Transformer(config, seed=0, layers=layers[stage::stages]).double() for stage in range(stages)]
    x, positions, layout, labels = batch_of(case)
    for part in range(parts):
        for model in models:
            given, x = x, model(x, positions, layout, labels, part)
            assert (part == parts - 1 and model is models[-1]) or x.shape == (model.rows(len(given)), WIDTH)
    loss = x[0]
    torch.autograd.backward(loss)
    wanted, expected = take(Transformer(config, seed=0).double(), case)
    assert torch.equal(loss, wanted)
    found = {name: torch.zeros_like(each) for name, each in expected.items()}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name] += parameter.grad
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) <= 1e-14, name


def test_stretches_of_layers_follow_each_other_and_differ_by_one() -> None:
    for layers, stretches in itertools.product(range(1, 20), range(1, 12)):
        if stretches > layers:
            with pytest.raises(ValueError, match=f"{layers} layers for {stretches} parts of a pipeline"):
                layers_of(layers, stretches)
            continue
        found = layers_of(layers, stretches)
        assert [layer for stretch in found for layer in stretch] == list(range(layers))
        assert {len(stretch) for stretch in found} <= {layers // stretches, -(-layers // stretches)}
        assert [stretch.start for stretch in found] == [layers * i // stretches for i in range(stretches)]


@pytest.mark.parametrize(
    ("change", "count", "message"),
    [
        ({}, 3, "heads is 4: must be a multiple of the tensor peers, 3"),
        ({"kv_heads": 2}, 4, "kv_heads is 2: must be a multiple of the tensor peers, 4"),
        ({"ffn_width": 30}, 4, "the MLP's width is 30: must be a multiple of the tensor peers, 4"),
        ({"experts": 6, "ffn_width": 30}, 4, "experts is 6: must be a multiple of the tensor peers, 4"),
        ({"vocab_size": 3}, 4, "vocab_size is 3: must be at least the number of tensor peers, 4"),
    ],
)
def test_a_model_that_peers_can_not_divide_is_refused(change: dict[str, Any], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(replace(PARALLEL, **change), seed=0, peers=Peers(count=count))


def test_rows_that_do_not_fit_a_part_are_refused() -> None:
    model = Transformer(PARALLEL, seed=0, layers=[range(2, 4)])
    _, positions, layout, labels = batch_of(Case(config=PARALLEL, count=1))
    with pytest.raises(ValueError, match=r"x \[16, 16\], position_ids \[17\]: must be \[17, 16\] and \[T\]"):
        model(torch.zeros(16, WIDTH), positions, layout, labels)
