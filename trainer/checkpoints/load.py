"""Loading: the newest checkpoint that verifies, into any grid of processes and any spread of tensors over them.

Ranks share the work: each verifies some of the files, and none reads a tensor before all have agreed that the
checkpoint is whole. Each reads what it holds of a tensor; what all replicas have is read by one and sent to the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from seqmesh.trainer.checkpoints.index import Chunks, read_index
from seqmesh.trainer.checkpoints.keep import checkpoint_path, checkpoints, step_of
from seqmesh.trainer.checkpoints.manifest import STATE, CheckpointError, DamageError, problems
from seqmesh.trainer.checkpoints.parts import share_out
from seqmesh.trainer.checkpoints.read import read_into
from seqmesh.trainer.grid import Grid
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """state: as given to the save, with `step`. bytes_read: of tensors, by this rank."""

    path: Path
    state: dict[str, Any]
    bytes_read: int


def newest_checkpoint(folder: Path, ranks: Ranks, say: Callable[[str], object]) -> Path | None:
    """The newest checkpoint that verifies, the same on all ranks; None where there is none. `say` hears of each damaged
    one that is passed over. Every rank calls it. Raises CheckpointError for one of another version."""
    left = checkpoints(folder) if ranks.is_first else []
    while (step := ranks.from_first(step_of(left.pop()) if left else -1)) >= 0:
        path = checkpoint_path(folder, step)
        try:
            verify_together(path, ranks)
        except DamageError as error:
            say(f"passed over: {error}")
        else:
            return path
    return None


def verify_together(path: Path, ranks: Ranks) -> None:
    """Raises what `verify` raises, on every rank alike; each reads its share of the files. Every rank calls it."""
    kind, found = "", ""
    try:
        found = next(problems(path, share=ranks.rank, shares=ranks.count), "")
    except DamageError as error:
        found = str(error)
    except CheckpointError as error:
        kind, found = "refused", str(error)
    if text := ranks.first_text(f"{kind}\n{found}" if found else ""):
        kind, _, found = text.partition("\n")
        raise CheckpointError(found) if kind else DamageError(found)


def load(path: Path, tensors: Saved, grid: Grid) -> Loaded:
    """Fill `tensors` in place from a verified checkpoint. Every rank calls it, each with what it has: all together have
    the checkpoint's tensors. Raises CheckpointError, on every rank, where they are others."""
    index = read_index(path)
    _check_fit(path, index, tensors, grid.world)
    data = grid.data
    readers = share_out(tensors, data.count)
    own = {name: part for name, part in tensors.items() if readers.get(name, data.rank) == data.rank}
    count, failed = 0, ""
    try:
        state = json.loads((path / STATE).read_bytes())
        count = read_into(path, index, own)
    except (DamageError, OSError, ValueError) as error:
        failed = str(error)
    if failed := grid.world.first_text(failed):  # or the others would wait for what is not sent
        raise DamageError(failed)
    for name, reader in readers.items():
        data.share_(tensors[name].local, reader)
    return Loaded(path=path, state=state, bytes_read=count)


def _check_fit(path: Path, index: Chunks, tensors: Saved, world: Ranks) -> None:
    """Raises CheckpointError, on every rank alike, unless what any rank has is there, and everything there is on some
    rank."""
    there = {
        name: (entry.properties.dtype, entry.size)
        for name, entry in index.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    problem = world.first_text(_misfit(there, tensors))
    held = torch.tensor([name in tensors for name in there], dtype=torch.int32, device=world.device)
    world.sum_(held)
    unheld = [name for name, holders in zip(there, held.tolist(), strict=True) if holders == 0]
    if unheld and not problem:
        problem = f"it holds {_some(sorted(unheld))}, which the model has not"
    if problem:
        raise CheckpointError(f"{path}: does not fit this model: {problem}")


def _misfit(there: Mapping[str, tuple[torch.dtype, torch.Size]], tensors: Saved) -> str:
    """What is wrong with the tensors that this rank has; empty where nothing is."""
    if missing := sorted(tensors.keys() - there.keys()):
        return f"it lacks {_some(missing)}"
    for name, part in tensors.items():
        here = (part.local.dtype, part.shape)
        if there[name] != here:
            (dtype, shape), (own_dtype, own_shape) = there[name], here
            return f"{name} is {dtype} {list(shape)} there and {own_dtype} {list(own_shape)} here"
    return ""


def _some(names: Sequence[str]) -> str:
    """The first few of many."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
