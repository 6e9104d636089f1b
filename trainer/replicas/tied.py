"""An embedding that is also the head, where a pipeline's first stage has it for the one and its last for the other.

The first stage owns it: it adds the last's gradient to its own, updates it, and sends the last what became of it. Two
messages a step, between processes of one replica; the same bits on both by construction, and moments on one alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from seqmesh.trainer.optim.trained import local
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.replicas.held import Holding


class Ends:
    """The embedding at one of the two ends, or nothing, where it is not so."""

    def __init__(self, holding: Holding, stages: Ranks) -> None:
        self._parameter = holding.ends.parameter if holding.ends else None
        self._stages = stages
        self._sent: dist.Work | None = None

    def add_(self) -> None:
        """Add the last stage's gradient, zeros where it has none, to the first's."""
        if self._parameter is None or not local(self._parameter).numel():
            return
        gradient = self._parameter.grad
        own = local(torch.zeros_like(self._parameter) if gradient is None else gradient)
        if self._stages.is_first:
            theirs = torch.empty_like(own)
            dist.recv(theirs, group=self._stages.group, group_src=self._stages.count - 1)
            own += theirs
        else:
            self._sent = dist.isend(own.contiguous(), group=self._stages.group, group_dst=0)

    def share_(self) -> None:
        """Replace the last stage's values by the first's."""
        if self._parameter is None or not local(self._parameter).numel():
            return
        values = local(self._parameter.detach())
        if self._stages.is_first:
            dist.send(values, group=self._stages.group, group_dst=self._stages.count - 1)
        else:
            dist.recv(values, group=self._stages.group, group_src=0)

    def zero_(self) -> None:
        """Clear the copy's gradient: the owner's is cleared with all others."""
        if self._sent is not None:
            assert self._parameter is not None
            self._sent.wait()
            self._sent = self._parameter.grad = None
