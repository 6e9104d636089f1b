"""What tests of checkpoints share: tensors of known content in every spread, and savers of one rank."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqmesh.trainer.checkpoints.config import CheckpointConfig
from seqmesh.trainer.checkpoints.load import Loaded, load
from seqmesh.trainer.checkpoints.save import Saver
from seqmesh.trainer.grid import Grid, one_each
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Part, Saved
from seqmesh.trainer.part import whole as plain

ALONE = Ranks(0, 1, torch.device("cpu"))
GRID = one_each(ALONE)
STATE = {"loader": {"stream": {"position": 3}}}
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model/embedding": ((23, 6), torch.float32),
    "model/norm": ((6,), torch.bfloat16),
    "model/scale": ((), torch.float64),
    "model/wide": ((3, 5, 4), torch.float32),
    "optimizer/embedding/exp_avg": ((23, 6), torch.float32),
    "optimizer/one": ((1, 4), torch.float32),
    "optimizer/step": ((), torch.int64),
}
SPREADS = ("plain", "columns", "rows", "last")


def whole_tensors(seed: int) -> dict[str, Tensor]:
    """Random content, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def plain_tensors(seed: int) -> Saved:
    """The same as every replica has them."""
    return {name: plain(value) for name, value in whole_tensors(seed).items()}


def spread(whole: dict[str, Tensor], how: str, ranks: Ranks) -> Saved:
    """What one rank has of the tensors; plain, and what has no dimensions: all. rows, columns: uneven, none on the
    first of several ranks. last: everything on the last rank."""
    return {name: _spread(value.clone(), how, ranks) for name, value in whole.items()}


def _spread(value: Tensor, how: str, ranks: Ranks) -> Part:
    if how == "plain" or value.ndim == 0:
        return plain(value)
    dim = 1 if how == "columns" and value.ndim > 1 else 0
    size, others = value.shape[dim], ranks.count - 1
    if how == "last" or others == 0:
        start, end = 0, size if ranks.rank == others else 0
    else:
        start, end = (size * max(rank, 0) // others for rank in (ranks.rank - 1, ranks.rank))
    offsets = tuple(start * (each == dim) for each in range(value.ndim))
    return Part(local=value.narrow(dim, start, end - start).clone(), shape=value.shape, offsets=offsets)


def zeros(tensors: Saved) -> Saved:
    """Make everything zero, in place."""
    for part in tensors.values():
        part.local.zero_()
    return tensors


def same(ours: Saved, theirs: Saved) -> bool:
    """Bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(_bytes(ours[name]), _bytes(theirs[name])) for name in ours)


def _bytes(part: Part) -> Tensor:
    return part.local.reshape(-1).view(torch.uint8)


def saver_of(
    folder: Path,
    tensors: Saved,
    grid: Grid = GRID,
    *,
    keep: int = 2,
    background: bool = False,
    timeout: float = 20,
    say: Callable[[str], object] = lambda _: None,
) -> Saver:
    config = CheckpointConfig(keep=keep, background=background)
    return Saver(folder, tensors, grid, config=config, timeout=timeout, say=say)


def save_alone(folder: Path, steps: Sequence[int], *, keep: int = 2) -> list[Path]:
    """Checkpoints of one rank; the tensors of a step are `whole_tensors(step)`."""
    for step in steps:
        tensors = plain_tensors(step)
        saver_of(folder, tensors, keep=keep).save(step, tensors, STATE | {"mark": step})
    return sorted(folder.glob("step-*"))


def load_alone(path: Path) -> tuple[Saved, dict[str, Any]]:
    tensors = zeros(plain_tensors(0))
    loaded: Loaded = load(path, tensors, GRID)
    return tensors, loaded.state


def is_step(path: Path, step: int) -> bool:
    """Whether a checkpoint holds the tensors and the state of `save_alone` for `step`."""
    tensors, state = load_alone(path)
    return same(tensors, plain_tensors(step)) and state["mark"] == state["step"] == step
