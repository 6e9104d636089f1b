"""What tests of checkpoints share: tensors of known content in every spread, and savers of one rank."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from seqmesh.trainer.checkpoints.config import CheckpointConfig
from seqmesh.trainer.checkpoints.load import Loaded, load
from seqmesh.trainer.checkpoints.parts import local_of
from seqmesh.trainer.checkpoints.save import Saver
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Part, Saved

ALONE = Ranks(0, 1, torch.device("cpu"))
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
SPREADS = ("plain", "shards", "columns", "rows", "last")


def whole_tensors(seed: int) -> dict[str, Tensor]:
    """Random content, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def spread(whole: dict[str, Tensor], how: str, ranks: Ranks) -> Saved:
    """What one rank has of the tensors. plain: all. shards, columns: DTensors. rows: `Part`s, uneven, none on the first
    of several ranks. last: a `Part` with everything on the last rank."""
    return {name: _spread(value.clone(), how, ranks) for name, value in whole.items()}


def _spread(value: Tensor, how: str, ranks: Ranks) -> Tensor | DTensor | Part:
    match how:
        case "plain":
            return value
        case "shards" | "columns":
            if value.ndim == 0:
                return value
            mesh = init_device_mesh("cpu", (ranks.count,))
            dim = 1 if how == "columns" and value.ndim > 1 else 0
            return distribute_tensor(value, mesh, [Shard(dim)])
        case "rows":
            rows = value.shape[0] if value.ndim else 1
            bounds = [rows * rank // max(ranks.count - 1, 1) for rank in range(ranks.count)]
            bounds = [0, *bounds] if ranks.count > 1 else [0, rows]
            return _part(value, bounds[ranks.rank], bounds[ranks.rank + 1])
        case _:
            rows = value.shape[0] if value.ndim else 1
            return _part(value, 0, rows if ranks.rank == ranks.count - 1 else 0)


def _part(value: Tensor, start: int, end: int) -> Part:
    if value.ndim == 0:
        return Part(local=value if end > start else value.new_empty(0), shape=value.shape, start=start)
    return Part(local=value[start:end].clone(), shape=value.shape, start=start)


def zeros(tensors: Saved) -> Saved:
    """Make everything zero, in place."""
    for value in tensors.values():
        local_of(value).zero_()
    return tensors


def same(ours: Saved, theirs: Saved) -> bool:
    """Bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(_bytes(ours[name]), _bytes(theirs[name])) for name in ours)


def _bytes(value: Tensor | DTensor | Part) -> Tensor:
    return local_of(value).reshape(-1).view(torch.uint8)


def saver_of(
    folder: Path,
    tensors: Saved,
    ranks: Ranks = ALONE,
    *,
    keep: int = 2,
    background: bool = False,
    timeout: float = 20,
    say: Callable[[str], object] = lambda _: None,
) -> Saver:
    config = CheckpointConfig(keep=keep, background=background)
    return Saver(folder, tensors, ranks, config=config, timeout=timeout, say=say)


def save_alone(folder: Path, steps: Sequence[int], *, keep: int = 2) -> list[Path]:
    """Checkpoints of one rank; the tensors of a step are `whole_tensors(step)`."""
    for step in steps:
        tensors: Saved = dict(whole_tensors(step))
        saver_of(folder, tensors, keep=keep).save(step, tensors, STATE | {"mark": step})
    return sorted(folder.glob("step-*"))


def load_alone(path: Path) -> tuple[Saved, dict[str, Any]]:
    tensors = zeros(dict(whole_tensors(0)))
    loaded: Loaded = load(path, tensors, ALONE)
    return tensors, loaded.state


def is_step(path: Path, step: int) -> bool:
    """Whether a checkpoint holds the tensors and the state of `save_alone` for `step`."""
    tensors, state = load_alone(path)
    return same(tensors, dict(whole_tensors(step))) and state["mark"] == state["step"] == step
