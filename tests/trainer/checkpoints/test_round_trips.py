"""What was saved by any number of ranks in any spread is loaded by any other, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.checkpoints.manifest import CheckpointError
from seqmesh.trainer.checkpoints.read import read_model
from seqmesh.trainer.grid import one_each
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved, whole
from tests.checkpoints import ALONE, SHAPES, SPREADS, STATE, same, saver_of, spread, whole_tensors, zeros
from tests.ranks import run_ranks

SCALARS = sum(value.nbytes for value in whole_tensors(0).values() if value.ndim == 0)


def load_then_save(ranks: Ranks, folder: Path) -> list[tuple[str, int, int]]:
    """Load everything that is there in all spreads, then save in all spreads; for each load the spread, the bytes that
    this rank read, and those that it alone has."""
    counts: list[tuple[str, int, int]] = []
    for run in sorted(folder.iterdir()):
        path = newest_checkpoint(run, ranks, print)
        assert path is not None
        seed = int(path.name[-8:])
        for how in SPREADS:
            expected = spread(whole_tensors(seed), how, ranks)
            tensors = zeros(spread(whole_tensors(0), how, ranks))
            found = load(path, tensors, one_each(ranks))
            assert same(tensors, expected), (run.name, how, ranks.rank)
            assert found.state["loader"] == STATE["loader"]
            counts.append((how, found.bytes_read, own_bytes(tensors)))
        misfit = tensors | {"model/wide": replace(tensors["model/wide"], shape=torch.Size([9, 5, 4]))}
        with pytest.raises(CheckpointError, match=r"fit this model: model/wide is .* \[3, 5, 4\] there and .* here"):
            load(path, misfit if ranks.is_first else tensors, one_each(ranks))  # on every rank alike
    for number, how in enumerate(SPREADS):
        step = 10 * ranks.count + number + 1
        tensors = spread(whole_tensors(step), how, ranks)
        with saver_of(folder / f"{ranks.count}-{how}", tensors, one_each(ranks), background=True) as saver:
            saver.save(step, tensors, STATE)
    return counts


def own_bytes(tensors: Saved) -> int:
    """Of tensors that lie on several ranks, what this one has."""
    return sum(part.local.nbytes for part in tensors.values() if not part.shared)


def test_every_spread_on_every_number_of_ranks(tmp_path: Path) -> None:
    load_then_save(ALONE, tmp_path)
    total = sum(value.nbytes for value in whole_tensors(0).values())
    for count in (3, 2):
        for results in zip(*run_ranks(load_then_save, count, tmp_path), strict=True):
            (how, *_), read, own = zip(*results, strict=True)
            if how == "plain":
                assert sum(read) == total
                assert max(read) <= 0.7 * total  # whole tensors are read once, by several ranks
            elif how != "columns":  # of which whole rows are read
                assert sum(read) == total
                assert all(0 <= there - here <= SCALARS for there, here in zip(read, own, strict=True))
    assert len(load_then_save(ALONE, tmp_path)) == 3 * len(SPREADS) ** 2
    for run in tmp_path.iterdir():
        (path,) = run.iterdir()
        expected = whole_tensors(int(path.name[-8:]))
        files = [load_file(file) for file in path.glob("rank-*.safetensors")]
        assert sum(tensor.numel() for file in files for tensor in file.values()) == sum(
            tensor.numel() for tensor in expected.values()
        )
        weights = {name: whole(tensor) for name, tensor in read_model(path).items()}
        assert same(weights, {n.removeprefix("model/"): whole(expected[n]) for n in SHAPES if n.startswith("model/")})
