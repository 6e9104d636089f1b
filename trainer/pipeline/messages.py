"""Messages from stage to stage, each on its way while both ends compute.

A receive is posted before its data is needed and waited for when it is. A send is held, with what is sent, until it has
surely arrived: it never stops who sends. Messages have no names: both ends go through them in one order, see `order`.

What two processes exchange in one group travels in one direction only. NCCL does it one after the other, as it was
posted, and receives that are posted early would stand in the way of sends. On a GPU waiting stops the stream, not the
host; not yet run on one.
"""

from __future__ import annotations

from collections import deque

import torch.distributed as dist
from torch import Tensor

from seqmesh.trainer.grid import Grid
from seqmesh.trainer.parallel import Ranks

Message = tuple[dist.Work, Tensor]


class Way:
    """What a stage sends goes `step` stages on, round at the end, and what it gets comes from as far before it. sends,
    receives: the stages, with the group for either. most: messages that can be sent and not yet taken; when there is
    one more, the first has been."""

    def __init__(self, sends: Ranks, receives: Ranks, step: int, most: int) -> None:
        self._sends, self._receives, self._most = sends.group, receives.group, most
        self._target, self._source = ((sends.rank + way) % sends.count for way in (step, -step))
        self._sent: deque[Message] = deque()
        self._expected: deque[Message] = deque()

    def send(self, rows: Tensor) -> None:
        rows = rows.contiguous()
        self._keep(dist.isend(rows, group=self._sends, group_dst=self._target), rows, self._sent)
        if len(self._sent) > self._most:
            _end(self._sent.popleft())

    def expect(self, room: Tensor) -> None:
        """The next message but those that are expected already is to be put there."""
        self._keep(dist.irecv(room, group=self._receives, group_src=self._source), room, self._expected)

    def receive(self) -> Tensor:
        """The first of those expected. Waits as long as the group may."""
        return _end(self._expected.popleft())

    def finish(self) -> None:
        """Wait for all that was sent."""
        while self._sent:
            _end(self._sent.popleft())

    @staticmethod
    def _keep(work: dist.Work | None, rows: Tensor, messages: deque[Message]) -> None:
        assert work is not None  # of the group's own members
        messages.append((work, rows))


def _end(message: Message) -> Tensor:
    work, rows = message
    work.wait()
    return rows


def make_ways(grid: Grid, most: int) -> tuple[Way, Way]:
    """For rows, and for their gradients; of two stages, where both go both ways, the same for both."""
    stages, returns = grid.stages, grid.returns
    if stages.count > 2:
        return Way(stages, stages, 1, most), Way(returns, returns, -1, most)
    way = Way(stages, returns, 1, most) if stages.is_first else Way(returns, stages, 1, most)
    return way, way
