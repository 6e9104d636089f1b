"""What processes send in one step, by the dimension of the grid that it crosses: counted, and as a formula has it.

Counted are the bytes that leave a process, however they travel: n members that gather send what each has to the n − 1
others; one that sums and scatters sends each other's share; a sum that all get is both. `data`: gradients, over
replicas. `ring`: keys and values, and their gradients. `tensor`: rows between peers, and the gradient of what they have
in common. `pipeline`: rows between stages, and their gradients. `world`: the few numbers that all processes sum.

The formula knows the model's shape, the plan and the grid; of what is sent it knows nothing. It is for parallel blocks
without experts, heads of their own, and replicated parameters.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqmesh.kernels.tensor_parallel import Peers
from seqmesh.packer.pieces import piece_tokens, rows_sent
from seqmesh.packer.plan import StepPlan
from seqmesh.trainer.grid import Grid, ParallelConfig
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import layers_of
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.replicas.flat import ALIGN
from seqmesh.trainer.step import EXTRA

DIMENSIONS = ("data", "ring", "tensor", "pipeline", "world")
WIDE, WHOLE_NUMBER = 8, 8  # bytes of float64, int64
SAID = 6  # whole numbers with which peers find out that they have the same rows and labels
STATISTICS = 3  # numbers of a supervised row that they merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What processes are asked: run one step of all documents of `data`, whose lengths these are, with a model of these
    settings on a grid of these."""

    data: str
    model: dict[str, int]
    parallel: dict[str, int]
    capacity: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """Bytes of all processes together, by dimension; and how many documents of the step were spread."""

    counted: dict[str, int]
    formula: dict[str, int]
    rings: int


class Sent(TorchDispatchMode):
    """Counts while it is open. sent: bytes of this process, by dimension."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is not typed
        self.sent = defaultdict[str, Fraction](Fraction)
        self._grid = grid
        self._lines = {
            str(line.group.group_name): name
            for name, line in (
                ("data", grid.data),
                ("tensor", grid.tensor),
                ("pipeline", grid.stages),
                ("pipeline", grid.returns),
            )
            if line.group is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kinds = [str(argument.type) for argument in func._schema.arguments]
            at = next(number for number, kind in enumerate(kinds) if kind.endswith(".ProcessGroup"))
            group = dist.ProcessGroup.unbox(args[at])
            sent = leaving(func._opname, args, group.size())
            self.sent[self._dimension(func._opname, group.group_name)] += sent
        return func(*args, **(kwargs or {}))

    def _dimension(self, operation: str, group: str) -> str:
        if group in self._lines:
            return self._lines[group]
        if operation in ("send", "recv_"):
            return "ring"
        world = self._grid.world.count  # a line of all processes has no group of its own
        lines = {"data": self._grid.data, "tensor": self._grid.tensor}
        return next((name for name, line in lines.items() if 1 < line.count == world), "world")


def leaving(operation: str, args: tuple[Any, ...], members: int) -> Fraction:
    """Bytes that leave this process in an operation of c10d, with these arguments. Raises ValueError for one that is
    not known."""
    first, second = (sum(each.nbytes for each in tree_leaves(given) if isinstance(each, Tensor)) for given in args[:2])
    if operation == "allreduce_":
        return Fraction(2 * (members - 1) * first, members)
    if operation in ("allgather_", "_allgather_base_"):
        return Fraction((members - 1) * second)
    if operation in ("reduce_scatter_", "_reduce_scatter_base_"):
        return Fraction(second - first)
    if operation in ("send", "recv_", "barrier"):
        return Fraction(first if operation == "send" else 0)
    raise ValueError(f"{operation} sends who knows how much")


def formula(plan: StepPlan, config: ModelConfig, parallel: ParallelConfig, itemsize: int) -> dict[str, int]:
    """Bytes of all processes together, by dimension. Raises ValueError for a model that it is not for."""
    if config.block != "parallel" or config.experts or config.tied_embeddings:
        raise ValueError(f"model is {config}: must be of parallel blocks, without experts or tied embeddings")
    tensor, replicas = parallel.tensor, plan.ranks
    rows, supervised = padded_rows(plan, parallel), plan.supervised_tokens
    held = [elements(config, parallel, stage, peer) for stage in range(parallel.stages) for peer in range(tensor)]
    common = sum(undivided for _, undivided in held[::tensor])  # of each stage
    boundaries = parallel.stages * parallel.parts - 1
    exchanges = 4 * config.layers + 4  # forward and backward: around each block, after the embedding, before the head
    keys = 2 * config.kv_heads * config.head_dim
    said = tensor * (tensor - 1) * (STATISTICS * supervised * itemsize + SAID * WHOLE_NUMBER * len(rows))
    processes = parallel.peers * replicas
    return {
        "data": 2 * (replicas - 1) * itemsize * sum(every for every, _ in held),
        "ring": 3 * int(rows_sent(plan.lengths, np.diff(plan.ring_offsets)).sum()) * config.layers * keys * itemsize,
        "tensor": said + (tensor - 1) * itemsize * (exchanges * sum(rows) * config.width + 2 * replicas * common),
        "pipeline": 2 * boundaries * sum(rows) * config.width * itemsize,
        "world": 2 * (processes - 1) * (EXTRA + 1) * WIDE,
    }


def padded_rows(plan: StepPlan, parallel: ParallelConfig) -> list[int]:
    """Of each micro-batch, as peers divide them."""
    tokens = np.zeros((plan.ranks, int(plan.waves.max(initial=0))), np.int64)
    pieces = piece_tokens(plan.lengths[plan.document], plan.ring_size, plan.ring_index)
    np.add.at(tokens, (plan.rank, plan.wave), pieces)
    peers = Peers(count=parallel.tensor, chunks=parallel.chunks)
    return [peers.rows(each) * peers.count for each in tokens[tokens > 0].tolist()]


def elements(config: ModelConfig, parallel: ParallelConfig, stage: int, peer: int) -> tuple[int, int]:
    """Of the gradient that a process has, each parameter's rounded up: all, and what tensor peers do not divide."""
    layers = layers_of(config.layers, parallel.stages * parallel.parts)[stage :: parallel.stages]
    with torch.device("meta"):
        model = Transformer(config, seed=0, layers=layers, peers=Peers(rank=peer, count=parallel.tensor))
    boxes, room = model.boxes(), {name: -(-p.numel() // ALIGN) * ALIGN for name, p in model.named_parameters()}
    return sum(room.values()), sum(each for name, each in room.items() if not boxes[name].divided)
