"""What of a model a process holds, and which of it is its own: to update, to count and to save.

The processes of a replica share its model, and some of it several of them have. What tensor peers do not divide each of
them has whole, with a share of its gradient: all update it, the first counts and saves it. An embedding that is also
the head lies at both ends of a pipeline: the first stage has it, the last a copy (`replicas.tied`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from seqmesh.trainer.grid import Grid
from seqmesh.trainer.models.division import Box
from seqmesh.trainer.models.transformer import Transformer, parameter_shapes
from seqmesh.trainer.optim.trained import Trained, local
from seqmesh.trainer.part import Part, Saved, whole

EMBEDDING = "embedding.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A parameter. number: in the whole model. common: every tensor peer has all of it, and a share of its gradient.
    spare: another process of the replica has it, too, and counts and saves it."""

    name: str
    number: int
    parameter: nn.Parameter
    box: Box
    common: bool = False
    spare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """updated: parameters, in the order of the whole model, which has `count`. ends: the embedding, here and at the
    other end of the pipeline, too. copy: the same where it is a copy, and not updated. rest: what else is saved. spare:
    whether this is not the first process of its replica, which saves what all of them have."""

    updated: tuple[Held, ...]
    count: int
    ends: Held | None
    copy: Held | None
    rest: Saved
    spare: bool


def holding_of(model: Transformer, grid: Grid) -> Holding:
    """Of this process. Where parameters are to be replaced by sharded ones, that comes first."""
    numbers = {name: number for number, name in enumerate(parameter_shapes(model.config))}
    named, tied = dict(model.named_parameters()), model.config.tied_embeddings and grid.stages.count > 1
    held = {name: _held(name, numbers[name], named[name], box, grid) for name, box in model.boxes().items()}
    ends = held.get(EMBEDDING) if tied else None
    copy = None if grid.stages.is_first else ends
    return Holding(
        updated=tuple(each for each in held.values() if each is not copy),
        count=len(numbers),
        ends=ends,
        copy=copy,
        rest=_buffers(model, named, grid),
        spare=not (grid.tensor.is_first and grid.stages.is_first),
    )


def _held(name: str, number: int, parameter: nn.Parameter, box: Box, grid: Grid) -> Held:
    common = grid.tensor.count > 1 and not box.divided
    copy = name == EMBEDDING and not grid.stages.is_first
    spare = copy or (common and not grid.tensor.is_first)
    return Held(name=name, number=number, parameter=parameter, box=box, common=common, spare=spare)


def _buffers(model: nn.Module, parameters: Mapping[str, nn.Parameter], grid: Grid) -> dict[str, Part]:
    """Those that are part of the model's state: every tensor peer has them whole."""
    saved = model.state_dict().keys() - parameters.keys()
    return {
        f"model/{name}": whole(buffer, spare=not grid.tensor.is_first)
        for name, buffer in model.named_buffers()
        if name in saved
    }


def trained_of(held: Sequence[Held], *, counted: bool = True) -> list[Trained]:
    """For an optimizer that updates parameters one by one. counted: whether this process counts its own in norms."""
    return [
        Trained(
            parameter=each.parameter,
            decayed=each.parameter.ndim > 1,
            owners=(each.number,),
            sizes=(local(each.parameter).numel(),),
            counted=counted and not each.spare,
        )
        for each in held
    ]
