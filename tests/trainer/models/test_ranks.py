"""On several ranks: windows over rings, and sharded models whose weights are those of a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqmesh.kernels.layout import Layout, Ring
from seqmesh.packer.pieces import chunk_sizes, piece_ranges
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import Box
from seqmesh.trainer.models.huggingface import load_huggingface, save_huggingface
from seqmesh.trainer.models.places import part_of
from seqmesh.trainer.models.transformer import Transformer, init_weights
from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Part
from seqmesh.trainer.replicas.make import make_replica
from seqmesh.trainer.replicas.replica import Sharding
from tests.kernels.reference import layout_of, positions_of, relative_error
from tests.ranks import run_ranks

RANKS = 2
SHARDINGS: tuple[Sharding, ...] = ("replicated", "optimizer", "parameters")
CONFIG = ModelConfig(vocab_size=37, width=24, layers=3, heads=4, kv_heads=2, head_width=8, ffn_width=41, init_std=0.2)
LLAMA = replace(CONFIG, block="serial", biases="qkv")
WINDOWED = (
    replace(CONFIG, windows=(9, None), biases="all"),
    replace(CONFIG, block="serial", norm="layer", activation="gelu", windows=(30, 4), biases="all"),
)
RINGS, WHOLE = (53, 31), (7, 12)  # documents over both ranks, and one on each


def random_ids(rows: int, seed: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (rows,), generator=torch.Generator().manual_seed(seed))


def gradients_of(config: ModelConfig, ids: Tensor, positions: Tensor, layout: Layout) -> list[Tensor]:
    """Of the sum of the loss, each token's label the id itself."""
    model = Transformer(config, seed=0).double()
    total, _ = model(ids, positions, layout, ids)
    return list(torch.autograd.grad(total, list(model.parameters())))


def ring_gradients(ranks: Ranks, config: ModelConfig) -> list[Tensor]:
    """Of both rings and both whole documents, summed over ranks; this rank holds its pieces and one whole document."""
    documents = [random_ids(length, seed=length) for length in (*RINGS, WHOLE[ranks.rank])]
    pieces = [piece_positions(length, ranks) for length in RINGS] + [torch.arange(WHOLE[ranks.rank])]
    bounds = list(accumulate(map(len, pieces), initial=0))
    members = tuple(range(ranks.count))
    rings = tuple(
        Ring(segment=i, start=bounds[i], ranks=members, index=ranks.rank, chunks=chunk_sizes(length, ranks.count))
        for i, length in enumerate(RINGS)
    )
    ids = torch.cat([document[piece] for document, piece in zip(documents, pieces, strict=True)])
    layout = Layout(torch.tensor(bounds, dtype=torch.int32), max(map(len, pieces)), rings)
    gradients = gradients_of(config, ids, torch.cat(pieces), layout)
    for gradient in gradients:
        ranks.sum_(gradient)
    return gradients


def piece_positions(length: int, ranks: Ranks) -> Tensor:
    early, late = piece_ranges(length, ranks.count, ranks.rank)
    return torch.cat((torch.arange(*early), torch.arange(*late)))


def sharded_on_meta(config: ModelConfig, ranks: Ranks) -> Transformer:
    """Sharded before it has any memory."""
    with torch.device("meta"):
        model = Transformer(config, seed=0).double()
    make_replica(model, one_each(ranks), "waves", extra=1)
    return model


def work(ranks: Ranks, folder: Path) -> None:
    torch.set_num_threads(1)
    drawn = sharded_on_meta(replace(LLAMA, biases="all"), ranks)
    init_weights(drawn, seed=5)
    same(drawn, Transformer(replace(LLAMA, biases="all"), seed=5))
    for sharding in SHARDINGS:
        same(started(folder, ranks, sharding), Transformer(LLAMA, seed=3))
    for config in WINDOWED:
        expected = one_process(config, (*RINGS, *WHOLE))
        for found, wanted in zip(ring_gradients(ranks, config), expected, strict=True):
            assert relative_error(found, wanted) <= 1e-9


def started(folder: Path, ranks: Ranks, sharding: Sharding) -> Transformer:
    """From weights, as a job does it: each rank reads what it holds."""
    model = Transformer(LLAMA, seed=0).double()
    replica = make_replica(model, one_each(ranks), "free", sharding, extra=1)
    optimizer = replica.make_optimizer(OptimConfig())
    held = {name: part for name, part in replica.tensors(optimizer).items() if name.startswith("model/")}
    load_huggingface(folder, LLAMA, {name.removeprefix("model/"): part for name, part in held.items()})
    replica.loaded(optimizer)
    return model


def same(model: Transformer, expected: Transformer) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        parameter = parameters[name]
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(found, weight.double()), name


def test_two_ranks_hold_and_compute_what_one_does(tmp_path: Path) -> None:
    save_huggingface(tmp_path, LLAMA, dict(Transformer(LLAMA, seed=3).named_parameters()))
    run_ranks(work, RANKS, tmp_path)


def one_process(config: ModelConfig, lengths: Sequence[int]) -> list[Tensor]:
    ids = torch.cat([random_ids(length, seed=length) for length in lengths])
    return gradients_of(config, ids, positions_of(lengths), layout_of(lengths))


def test_any_box_of_a_tensor_is_a_place() -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    everything = part_of(tensor, Box(shape=tensor.shape, offsets=(0, 0), divided=False))
    assert everything.local is tensor
    assert torch.equal(tensor[everything.place], tensor)
    for first, rows, column, columns in ((1, 2, 0, 3), (4, 0, 0, 3), (0, 4, 1, 2)):
        part = Part(local=torch.zeros(rows, columns), shape=tensor.shape, offsets=(first, column))
        part.local.copy_(tensor[part.place])
        assert torch.equal(part.local, tensor[first : first + rows, column : column + columns])
