"""Loading: the newest checkpoint that verifies, into any number of ranks and any spread of tensors over them.

Ranks share the work: each verifies some of the files, and none reads a tensor before all have agreed that the
checkpoint is whole. Each reads what it holds of a tensor; what all replicas have is read by one and sent to the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from seqmesh.trainer.checkpoints.index import Chunks, read_index
from seqmesh.trainer.checkpoints.keep import checkpoint_path, checkpoints, step_of
from seqmesh.trainer.checkpoints.manifest import STATE, CheckpointError, DamageError, problems
from seqmesh.trainer.checkpoints.parts import share_out
from seqmesh.trainer.checkpoints.read import read_into
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
    for text in ranks.texts(f"{kind}\n{found}"):
        kind, _, found = text.partition("\n")
        if found:
            raise CheckpointError(found) if kind else DamageError(found)


def load(path: Path, tensors: Saved, ranks: Ranks) -> Loaded:
    """Fill `tensors` in place from a verified checkpoint. Every rank calls it, each with what it has of the same
    tensors. Raises CheckpointError where they are not those of the checkpoint."""
    index = read_index(path)
    _check_fit(path, index, tensors)
    readers = share_out(tensors, ranks.count)
    own = {name: part for name, part in tensors.items() if readers.get(name, ranks.rank) == ranks.rank}
    count, failed = 0, ""
    try:
        state = json.loads((path / STATE).read_bytes())
        count = read_into(path, index, own)
    except (DamageError, OSError, ValueError) as error:
        failed = str(error)
    if failed := next(filter(None, ranks.texts(failed)), ""):  # or the others would wait for what is not sent
        raise DamageError(failed)
    for name, reader in readers.items():
        ranks.share_(tensors[name].local, reader)
    return Loaded(path=path, state=state, bytes_read=count)


def _check_fit(path: Path, index: Chunks, tensors: Saved) -> None:
    held = index.metadata.state_dict_metadata
    if names := sorted(held.keys() ^ tensors.keys()):
        raise CheckpointError(f"{path}: does not fit this model: {_some(names)} in one and not in the other")
    for name, part in tensors.items():
        entry = held[name]
        assert isinstance(entry, TensorStorageMetadata)
        there, here = (entry.properties.dtype, entry.size), (part.local.dtype, part.shape)
        if there != here:
            words = " and ".join(
                f"{dtype} {list(shape)} {where}" for (dtype, shape), where in ((there, "there"), (here, "here"))
            )
            raise CheckpointError(f"{path}: does not fit this model: {name} is {words}")


def _some(names: Sequence[str]) -> str:
    """The first few of many."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
