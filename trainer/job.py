"""What one process trains: the parts of a job, put together from its configuration. Loop and checkpoints work on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from seqmesh.kernels.tensor_parallel import Peers
from seqmesh.loader.cost_file import cost_digest
from seqmesh.loader.embedded import Loader
from seqmesh.packer.cost import CostModel
from seqmesh.trainer.checkpoints.save import Saver
from seqmesh.trainer.config import TrainConfig
from seqmesh.trainer.flops import Peak, Work, find_peak, make_work
from seqmesh.trainer.grid import Grid, ParallelConfig
from seqmesh.trainer.host import Host
from seqmesh.trainer.models.balance import loads_size
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import layers_of
from seqmesh.trainer.models.transformer import Transformer, init_weights
from seqmesh.trainer.offload import Offloader
from seqmesh.trainer.part import Saved
from seqmesh.trainer.passes import Passes
from seqmesh.trainer.recompute import set_recompute
from seqmesh.trainer.replicas import Replica, make_replica, sharding_of
from seqmesh.trainer.step import EXTRA, Runner, make_runner

Say = Callable[[str], object]


@dataclass(slots=True, kw_only=True)
class Job:
    """grid: where this process stands. say: gets the first one's lines for people. work: what steps are counted as.
    step: steps done; saved: those of the newest checkpoint."""

    config: TrainConfig
    grid: Grid
    loader: Loader
    say: Say
    model: Transformer
    replica: Replica
    runner: Runner
    offloader: Offloader | None
    optimizer: torch.optim.Optimizer
    work: Work
    peak: Peak
    saver: Saver
    step: int = 0
    saved: int = 0

    @property
    def folder(self) -> Path:
        """Of logs and checkpoints."""
        return Path(self.config.run)

    def tensors(self) -> Saved:
        """What a checkpoint holds, each tensor the storage that the next step changes."""
        return self.replica.tensors(self.optimizer)

    @property
    def cost(self) -> str:
        """Digest of what ranks are balanced by."""
        return cost_digest(self.loader.settings.cost or CostModel())


def make_job(config: TrainConfig, grid: Grid, loader: Loader, say: Say) -> Job:
    """A job at step 0."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = _make_model(config, grid, dtype)
    spread = next(model.parameters()).is_meta
    set_recompute(model.blocks, config.recompute)
    offloader = Offloader(model.blocks, Host.of(grid.world.device)) if config.offload else None
    extra = EXTRA + loads_size(config.model)
    replica = make_replica(model, grid, config.loader.mode, config.sharding, extra=extra)
    if spread:
        init_weights(model, config.seed)
    optimizer = replica.make_optimizer(config.optim)
    work = count_work(config.model)
    passes = Passes(
        model=model,
        replica=replica,
        grid=grid,
        capacity=config.loader.capacity,
        work=work,
        offloader=offloader,
    )
    say = say if grid.world.is_first else lambda _text: None
    saver = Saver(
        Path(config.run),
        replica.tensors(optimizer),
        grid,
        config=config.checkpoint,
        timeout=config.timeout,
        say=say,
    )
    return Job(
        config=config,
        grid=grid,
        loader=loader,
        say=say,
        model=model,
        replica=replica,
        runner=make_runner(passes, config.parallel.parts),
        offloader=offloader,
        optimizer=optimizer,
        work=work,
        peak=find_peak(grid.world.device, dtype, config.peak_flops),
        saver=saver,
    )


def _make_model(config: TrainConfig, grid: Grid, dtype: torch.dtype) -> Transformer:
    """What this process holds of it, with its weights; on the meta device, without, where parameters are to be sharded:
    no process ever has them all."""
    if sharding_of(grid, config.loader.mode, config.sharding) != "parameters":
        return held_model(config.model, config.parallel, grid, seed=config.seed).to(grid.world.device, dtype)
    with torch.device("meta"):
        return held_model(config.model, config.parallel, grid, seed=config.seed).to(dtype)


def held_model(config: ModelConfig, parallel: ParallelConfig, grid: Grid, *, seed: int) -> Transformer:
    """What a process of the grid holds of a model: its stage's stretches of layers, and its share of each."""
    stages, tensor = grid.stages, grid.tensor
    layers = layers_of(config.layers, stages.count * parallel.parts)[stages.rank :: stages.count]
    peers = Peers(group=tensor.group, rank=tensor.rank, count=tensor.count, chunks=parallel.chunks)
    return Transformer(config, seed=seed, layers=layers, peers=peers)


def count_work(config: ModelConfig) -> Work:
    """Of the whole model, however many processes share it."""
    return make_work(
        block_parameters=config.layers * config.shape.layer_weights,
        head_parameters=config.vocab_size * config.width,
        heads=config.heads,
        head_dim=config.head_dim,
        windows=config.layer_windows,
    )
