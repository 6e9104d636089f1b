"""Where a process stands among all of a job: in which replica of the model, which stage of it, which tensor peer.

Process number = (stage · replicas + replica) · tensor peers + tensor peer. Tensor peers, who exchange the most, are
neighbours and so on one machine; replicas come next, for their rings; stages are furthest apart.

Every axis has a group for each of its lines, all made at the start (`make_grid`), by all processes in one order; none
is made later. What is planned, and calls its ranks by numbers from 0, knows replicas alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from seqmesh.trainer.parallel import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many processes share one replica of the model. tensor: divide every layer. stages: of a pipeline, each with
    some of the layers, in `parts` stretches. chunks: that exchanges of tensor peers are cut into, so that they overlap
    with matmuls on a GPU."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    tensor: int = 1
    stages: int = 1
    parts: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "stages", "parts", "chunks"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")
        if self.parts > 1 and self.stages == 1:
            raise ValueError(f"parts is {self.parts}: one stage has all layers in one")

    @property
    def peers(self) -> int:
        """Processes of a replica."""
        return self.tensor * self.stages

    def replicas(self, processes: int) -> int:
        """Of so many processes. Raises ValueError where those are not so many whole ones."""
        if processes % self.peers:
            raise ValueError(
                f"{processes} processes: must be a multiple of parallel.tensor · parallel.stages, "
                f"{self.tensor} · {self.stages}"
            )
        return processes // self.peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """world: all processes. data: the replicas' processes of this stage and tensor index; its rank is the replica's
    number, as plans count. tensor: those that divide this process's layers with it. stages: of this replica and tensor
    index, first to last; what goes from stage to stage travels in its group, what comes back in that of `returns`, the
    same processes: neither can hold up the other."""

    world: Ranks
    data: Ranks
    tensor: Ranks
    stages: Ranks
    returns: Ranks

    @property
    def speaks(self) -> bool:
        """Whether this process is the one of its replica that has its loss: of the last stage, the first peer."""
        return self.tensor.is_first and self.stages.rank == self.stages.count - 1

    def process(self, replica: int) -> int:
        """The process of another replica that has this one's place in it."""
        return (self.stages.rank * self.data.count + replica) * self.tensor.count + self.tensor.rank

    def peers_within(self, machine: int) -> tuple[int, int]:
        """This process's number among those of its replica on this machine, and how many these are, where every
        machine has so many processes, in order."""
        first = self.data.rank * self.tensor.count
        step = self.data.count * self.tensor.count
        held = [first + stage * step + peer for stage in range(self.stages.count) for peer in range(self.tensor.count)]
        here = [process for process in held if process // machine == self.world.rank // machine]
        return here.index(self.world.rank), len(here)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The processes of each axis that go through one of them, itself included, in order."""

    data: list[int]
    tensor: list[int]
    stages: list[int]


def lines_through(process: int, processes: int, config: ParallelConfig) -> Lines:
    """Raises ValueError where they are not so many whole replicas."""
    replicas = config.replicas(processes)
    rest, peer = divmod(process, config.tensor)
    stage, replica = divmod(rest, replicas)

    def number(stage: int, replica: int, peer: int) -> int:
        return (stage * replicas + replica) * config.tensor + peer

    return Lines(
        data=[number(stage, other, peer) for other in range(replicas)],
        tensor=[number(stage, replica, other) for other in range(config.tensor)],
        stages=[number(other, replica, peer) for other in range(config.stages)],
    )


def make_grid(world: Ranks, config: ParallelConfig) -> Grid:
    """All processes call it, once. Raises ValueError where they are not so many whole replicas."""
    lines, several = lines_through(world.rank, world.count, config), config.stages > 1
    return Grid(
        world=world,
        tensor=_line(world, "tensor", lines.tensor),
        data=_line(world, "data", lines.data),
        stages=_line(world, "stages", lines.stages, own=several),
        returns=_line(world, "returns", lines.stages, own=several),
    )


def one_each(world: Ranks) -> Grid:
    """Of replicas that are one process each."""
    return make_grid(world, ParallelConfig())


def alone(device: torch.device) -> Grid:
    """Of one process."""
    return one_each(Ranks(0, 1, device))


def _line(world: Ranks, name: str, members: list[int], *, own: bool = False) -> Ranks:
    """The group of these processes, this one among them. Each process makes its own and no other: all make equally many
    in the same order. own: also where they are all processes. name: of the axis, as the flight recorder shows it.

    On GPUs torch splits the communicator of all processes, which is connected already: one ncclCommSplit, in which
    every process names its own line, and nothing goes through the store. Not yet run on a GPU.
    """
    group = None
    if own or 1 < len(members) < world.count:
        timeout = None if world.timeout is None else timedelta(seconds=world.timeout)
        group = dist.new_group(members, timeout=timeout, use_local_synchronization=True, group_desc=name)
    return replace(world, rank=members.index(world.rank), count=len(members), group=group)
