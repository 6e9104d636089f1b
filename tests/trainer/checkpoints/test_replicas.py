"""A checkpoint of a model that is spread in one way is loaded by every other, on any number of ranks."""

import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from seqmesh.packer.plan import Mode
from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved
from seqmesh.trainer.replicas import Replica, Sharding, make_replica
from tests.checkpoints import ALONE, same, saver_of, zeros
from tests.ranks import run_ranks

MODEL = ModelConfig(vocab_size=11, width=6, layers=1, heads=3, kv_heads=1)
WAYS: tuple[tuple[Mode, Sharding], ...] = (("free", "replicated"), ("free", "optimizer"), ("waves", "parameters"))


def content(name: str, shape: torch.Size) -> Tensor:
    """Of a whole tensor, by its name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def expected(tensors: Saved) -> Saved:
    """The same, with their content."""
    return {name: replace(part, local=content(name, part.shape)[part.place].clone()) for name, part in tensors.items()}


def made(ranks: Ranks, mode: Mode, sharding: Sharding) -> tuple[Transformer, Replica, torch.optim.Optimizer]:
    model = Transformer(MODEL, seed=ranks.rank)
    replica = make_replica(model, one_each(ranks), mode, sharding, extra=3)
    return model, replica, replica.make_optimizer(OptimConfig())


def load_then_save(ranks: Ranks, folder: Path) -> int:
    """Load what is there in every way, then save in every way; checkpoints loaded."""
    loads = 0
    for run in sorted(folder.iterdir()):
        path = newest_checkpoint(run, ranks, print)
        assert path is not None
        for mode, sharding in WAYS:
            model, replica, optimizer = made(ranks, mode, sharding)
            tensors = zeros(replica.tensors(optimizer))
            load(path, tensors, one_each(ranks))
            replica.loaded(optimizer)
            assert same(replica.tensors(optimizer), expected(tensors)), (run.name, mode, sharding)
            if sharding != "parameters":  # every rank has all of them, also those that it did not read
                for name, parameter in model.named_parameters():
                    assert torch.equal(parameter, content(f"model/{name}", parameter.shape))
            loads += 1
    for mode, sharding in WAYS:
        _, replica, optimizer = made(ranks, mode, sharding)
        tensors = replica.tensors(optimizer)
        for name, value in expected(tensors).items():
            tensors[name].local.copy_(value.local)
        with saver_of(folder / f"{ranks.count}-{mode}-{sharding}", tensors, one_each(ranks)) as saver:
            saver.save(1, tensors, {})
    return loads


def test_any_way_loads_any_other(tmp_path: Path) -> None:
    load_then_save(ALONE, tmp_path)
    for runs, count in ((1, 3), (2, 2)):
        assert run_ranks(load_then_save, count, tmp_path) == [len(WAYS) ** 2 * runs] * count
    assert load_then_save(ALONE, tmp_path) == len(WAYS) ** 2 * 3
