"""A replica by its name."""

from __future__ import annotations

from seqmesh.packer.plan import Mode
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.replicas.optimizer import OptimizerSharded
from seqmesh.trainer.replicas.parameters import ParametersSharded
from seqmesh.trainer.replicas.replica import Replica, Sharding
from seqmesh.trainer.replicas.replicated import Replicated


def sharding_of(ranks: Ranks, mode: Mode, sharding: Sharding | None) -> Sharding:
    """None is what suits the mode: replicated for `free`, parameters for `waves`. One rank has nothing to spread:
    replicated."""
    if ranks.count == 1:
        return "replicated"
    return sharding or ("replicated" if mode == "free" else "parameters")


def make_replica(
    model: Transformer, ranks: Ranks, mode: Mode, sharding: Sharding | None = None, *, extra: int
) -> Replica:
    """Spread a model over the ranks, in place, as `sharding_of` says. One on the meta device gets memory for what this
    rank keeps, and no weights: parameters must then be sharded."""
    chosen = sharding_of(ranks, mode, sharding)
    if chosen == "replicated":
        return Replicated(model, ranks, extra=extra)
    if chosen == "optimizer":
        return OptimizerSharded(model, ranks, extra=extra)
    return ParametersSharded(model, ranks, mode, extra=extra)
