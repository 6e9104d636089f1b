"""A model of any kind, as a replica holds one that is whole on every process."""

from torch import nn

from seqmesh.trainer.models.division import Box
from seqmesh.trainer.replicas.held import Held, Holding


def holding_whole(model: nn.Module) -> Holding:
    updated = tuple(
        Held(name=name, number=number, parameter=p, box=Box(shape=p.shape, offsets=(0,) * p.ndim, divided=False))
        for number, (name, p) in enumerate(model.named_parameters())
    )
    return Holding(updated=updated, count=len(updated), ends=None, copy=None, rest={}, spare=False)
