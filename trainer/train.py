"""A training job on one process: join the others, keep other jobs out, resume, run the steps, end with an exit code.

Run by torchrun, one process per device: `torchrun --nproc-per-node 2 -m seqmesh.trainer.train CONFIG.yaml
key=value...`, or through `seqmesh train`, which does that. The first process of each machine starts the machine's
loader process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
from filelock import FileLock

from seqmesh.loader.cost_file import cost_digest
from seqmesh.loader.embedded import Loader
from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.trainer.config import TrainConfig, load_config, save_config
from seqmesh.trainer.grid import Grid, make_grid
from seqmesh.trainer.job import Say, make_job
from seqmesh.trainer.logs import check_installed
from seqmesh.trainer.loop import run
from seqmesh.trainer.parallel import Ranks, end_with_parent, join_ranks
from seqmesh.trainer.process import repeatable
from seqmesh.trainer.saving import resume


def loader_settings(config: TrainConfig, ranks: int) -> LoaderSettings:
    """The loader's settings for this job: its mesh, its cost model and its offload. ranks: replicas of the model."""
    settings = replace(
        config.loader,
        ranks=ranks,
        stages=config.parallel.stages,
        cost=config.cost_model(),
        offload=config.planned_offload(),
    )
    settings.check_mesh()
    return settings


def train(config: TrainConfig, say: Say = print) -> int:
    """Run the job on this process; returns the steps done. `say` gets the first one's lines.

    Raises ValueError for a configuration that does not fit the data or the number of processes, RuntimeError where
    another job uses the run folder, LoaderError, CheckpointError, and what torch.distributed raises where another rank
    is lost.
    """
    check_installed(config.log)
    with (
        repeatable(config.deterministic, config.seed),
        join_ranks(config.timeout) as world,
        _claim(Path(config.run), world),
    ):
        grid = make_grid(world, config.parallel)
        if world.is_first:
            save_config(config, Path(config.run) / "config.yaml")
        settings = loader_settings(config, grid.data.count)
        world.agree(cost_digest(settings.cost or CostModel()), "the digest of the cost model")
        with _open_loader(config, settings, grid) as loader:
            _check_vocabulary(config, loader)
            job = make_job(config, grid, loader, say)
            resume(job)
            run(job)
            world.wait_for_all()  # the machine's loader ends with its first process: not before all have their data
            return job.step


def _open_loader(config: TrainConfig, settings: LoaderSettings, grid: Grid) -> Loader:
    """The batches of this process's replica, which those of it on this machine share."""
    peer, peers = grid.peers_within(int(os.environ.get("LOCAL_WORLD_SIZE", grid.world.count)))
    return Loader(
        settings,
        rank=grid.data.rank,
        peer=peer,
        peers=peers,
        device=grid.world.device,
        timeout=config.timeout,
        credit_bytes=config.credit_bytes,
    )


@contextmanager
def _claim(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Make the run folder and keep other jobs out of it while this one runs, or dies in whatever way."""
    if not ranks.is_first:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", blocking=False):
            yield
    except filelock.Timeout:
        raise RuntimeError(f"{folder} is in use by another training job: wait for it, or choose another run") from None


def _check_vocabulary(config: TrainConfig, loader: Loader) -> None:
    if config.model.vocab_size < loader.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}: the shards' tokenizer has {loader.vocab_size} ids"
        )


def main(arguments: list[str]) -> int:
    """`CONFIG.yaml key=value...`; returns the exit code."""
    end_with_parent()
    try:
        train(load_config(arguments[0], arguments[1:]), say=_print)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("SEQMESH_DEBUG"):
            raise
        _print(f"error: rank {os.environ.get('RANK', '0')}: {error}")
        return 1
    return 0


def _print(text: Any) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
