"""Messages between members: batches of point-to-point sends and receives on the standing default process group.

No group is ever made. On CUDA, NCCL runs a batch on a stream of its own after what the current stream has been given so
far, and waiting makes the current stream wait, not the host: overlap with what was queued meanwhile needs nothing more.
With gloo, waiting stops the host. Either way every Work is held and awaited: one that is dropped may never be done
(pytorch #152938).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

Rows = tuple[Tensor, int]  # a contiguous tensor and the rank that sends or receives it


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages under way. Buffers live, and those to send must keep their values, until `wait` lets go of them."""

    works: list[dist.Work]
    sent: list[Rows]
    received: list[Rows]

    @property
    def bytes_sent(self) -> int:
        return sum(rows.numel() * rows.element_size() for rows, _ in self.sent)

    def wait(self) -> list[Tensor]:
        """The received buffers, in the order given. Once only."""
        for work in self.works:
            work.wait()
        received = [rows for rows, _ in self.received]
        for held in (self.works, self.sent, self.received):
            held.clear()
        return received


def exchange(send: list[Rows], receive: list[Rows]) -> Messages:
    """Start one batch. Messages without rows are not sent: both ends know their size."""
    operations = [dist.P2POp(dist.isend, rows, peer) for rows, peer in send if rows.numel()]
    operations += [dist.P2POp(dist.irecv, rows, peer) for rows, peer in receive if rows.numel()]
    return Messages(dist.batch_isend_irecv(operations) if operations else [], send, receive)
