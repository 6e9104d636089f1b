"""A replica by its name."""

from __future__ import annotations

from seqmesh.packer.plan import Mode
from seqmesh.trainer.grid import Grid
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.replicas.held import holding_of
from seqmesh.trainer.replicas.optimizer import OptimizerSharded
from seqmesh.trainer.replicas.parameters import ParametersSharded
from seqmesh.trainer.replicas.replica import Replica, Sharding
from seqmesh.trainer.replicas.replicated import Replicated


def sharding_of(grid: Grid, mode: Mode, sharding: Sharding | None) -> Sharding:
    """None is what suits the mode: replicated for `free`, parameters for `waves`. One replica has nothing to spread:
    replicated."""
    if grid.data.count == 1:
        return "replicated"
    return sharding or ("replicated" if mode == "free" else "parameters")


def make_replica(
    model: Transformer, grid: Grid, mode: Mode, sharding: Sharding | None = None, *, extra: int
) -> Replica:
    """Spread what this process holds of a model over the replicas, in place, as `sharding_of` says. One on the meta
    device gets memory for what this process keeps, and no weights: parameters must then be sharded. Every process calls
    it."""
    chosen = sharding_of(grid, mode, sharding)
    if chosen == "parameters":
        return ParametersSharded(model, grid, mode, extra=extra)
    kind = OptimizerSharded if chosen == "optimizer" else Replicated
    return kind(holding_of(model, grid), grid, extra=extra)
