"""Every replica keeps a part of every parameter and gathers the rest to compute with it (FSDP2).

Two ways. Where every rank runs every wave, parameters are gathered for each wave anew, forward and backward, and let go
of after it; gradients are reduced in the last wave. Otherwise they are gathered once a step and kept, gradients too, so
that ranks may differ in their number of micro-batches, and are reduced at the end: by a filler of weight zero that
every rank runs after its own work. A rank that reduced in its own last micro-batch would wait there for ranks that
wait for it in a ring.

For the same reason all gathers of a step are started before its first micro-batch: a rank that still had to gather
inside its first one would wait for ranks that are in a ring with a third one.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from seqmesh.packer.plan import Mode
from seqmesh.trainer.grid import Grid
from seqmesh.trainer.models.division import STACK
from seqmesh.trainer.models.transformer import Transformer
from seqmesh.trainer.optim.config import OptimConfig
from seqmesh.trainer.optim.make import make_optimizer_over
from seqmesh.trainer.optim.trained import local
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved
from seqmesh.trainer.replicas.filler import run_filler
from seqmesh.trainer.replicas.held import Held, holding_of, trained_of
from seqmesh.trainer.replicas.saved import spread_step, tensors_of
from seqmesh.trainer.replicas.tied import Ends
from seqmesh.trainer.replicas.totals import Totals


class ParametersSharded:
    """A model under FSDP2, in place. Its parameters, as the optimizer sees them, are DTensors over the replicas, each
    of what this process would have unsharded. A model on the meta device gets memory for this process's part of it, and
    no weights."""

    def __init__(self, model: Transformer, grid: Grid, mode: Mode, *, extra: int) -> None:
        self.runs_every_wave = mode == "waves"
        self._model, self._grid = model, grid
        self._modules = _shard(model, grid.data, gather_again=self.runs_every_wave)
        if next(model.parameters()).is_meta:
            model.to_empty(device=grid.world.device)
        self._holding = holding_of(model, grid)  # now: FSDP shows other tensors while they are gathered
        self._ends = Ends(self._holding, grid.stages)
        self._totals = Totals(grid.world, extra)
        self.extra = self._totals.extra
        self._reduce_in_backward(self.runs_every_wave)

    def make_optimizer(self, config: OptimConfig) -> torch.optim.Optimizer:
        return make_optimizer_over(
            trained_of(self._holding.updated), self._holding.count, config, self._grid.world.sum_
        )

    def begin_step(self) -> None:
        """Gathers, in order of use: all that are kept; or the first two, from which on each starts the next."""
        for module in self._modules[:2] if self.runs_every_wave else self._modules:
            module.unshard(async_op=True)  # nothing where it is done or under way

    def before_backward(self, *, last: bool) -> None:
        if self.runs_every_wave:
            self._reduce_in_backward(last)
        else:
            self.begin_step()

    def _reduce_in_backward(self, on: bool) -> None:
        root = self._modules[0]
        root.set_requires_gradient_sync(on)
        root.set_is_last_backward(on)
        if not self.runs_every_wave:
            root.set_reshard_after_backward(on)

    def reduce_(self) -> None:
        if not self.runs_every_wave:
            self.begin_step()
            self._reduce_in_backward(True)
            run_filler(self._model, self._grid.world.device)
            self._reduce_in_backward(False)
        self._ends.add_()
        self._sum_common()
        self._totals.reduce_([gradient for held, gradient in self._gradients() if not held.spare])

    def _sum_common(self) -> None:
        """Over tensor peers, whose shards of what they have in common are alike."""
        shares = [gradient for held, gradient in self._gradients() if held.common]
        if not shares:
            return
        flat = torch.cat([share.reshape(-1) for share in shares])
        self._grid.tensor.sum_(flat)
        for share, summed in zip(shares, torch.split(flat, [share.numel() for share in shares]), strict=True):
            share.copy_(summed.view_as(share))

    def norm(self) -> float:
        return self._totals.norm()

    def scale_(self, factor: float) -> None:
        torch._foreach_mul_([gradient for _, gradient in self._gradients()], factor)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._ends.share_()

    def zero_(self) -> None:
        self._ends.zero_()
        for held in self._holding.updated:
            held.parameter.grad = None
        self._totals.zero_()

    def tensors(self, optimizer: torch.optim.Optimizer) -> Saved:
        return tensors_of(self._holding, optimizer)

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        spread_step(optimizer)

    def _gradients(self) -> list[tuple[Held, Tensor]]:
        """This process's part of every gradient."""
        return [(held, local(p.grad)) for held in self._holding.updated if (p := held.parameter).grad is not None]


def _cut(count: int, parameter: nn.Parameter) -> Shard:
    """By its first dimension. Stacks of experts' matrices have few of those: then by the rows of each, where they can
    be cut evenly, as FSDP wants it."""
    inside = parameter.ndim == STACK and len(parameter) % count and parameter.shape[1] % count == 0
    return Shard(1 if inside else 0)


def _shard(model: Transformer, data: Ranks, *, gather_again: bool) -> list[FSDPModule]:
    """The modules that gather, in order of use: the model, for what is in no block, and its blocks."""
    group = data.group or dist.group.WORLD
    assert group is not None, "one replica has nothing to shard"
    mesh = DeviceMesh.from_group(group, data.device.type)  # init_device_mesh would make a group of its own
    cut = partial(_cut, data.count)
    for module in (*model.blocks, model):
        # What the model gathers for itself is used last, and first again in backward: kept in either case.
        again = gather_again and module is not model
        fully_shard(module, mesh=mesh, reshard_after_forward=again, shard_placement_fn=cut)
    order = [module for module in (model, *model.blocks) if isinstance(module, FSDPModule)]
    for each in order:
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    for each, following in itertools.pairwise(order):
        each.set_modules_to_forward_prefetch([following])  # backward, FSDP goes back in the order it saw
    return order
