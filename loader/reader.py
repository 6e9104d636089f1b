"""`Reader`: what the loader process knows of one rank that it serves. No sockets; `server` owns one per connection.

None of it needs to outlive the connection: a rank that is forgotten says hello again and names its position.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from seqmesh.loader.feed import Position
from seqmesh.loader.wire import Ack, End, Heartbeat

MAX_UNDER_WAY = 256  # batches; bounds the read-ahead of very small ones, of which the credit would allow thousands
HEARTBEAT_SECONDS = 1.0
MAX_HEARTBEATS = 60  # in a row to a rank that says nothing, so that the queue of a stopped one does not grow for ever


@dataclass(slots=True, kw_only=True)
class Reader:
    """A rank that is being served: where it is, how many bytes it will still take, what waits for more credit.

    limit: bytes that may be under way. sent, used: batches of this session, and those the rank has acknowledged;
    sent_bytes, used_bytes: of their arrays. spoken: when something was last sent to it, in seconds of the monotonic
    clock. unanswered: heartbeats since it last spoke.
    """

    rank: int
    session: int
    position: Position
    limit: int
    sent: int = 0
    sent_bytes: int = 0
    used: int = 0
    used_bytes: int = 0
    waiting: list[Any] | None = None
    ended: bool = False
    spoken: float = field(default_factory=time.monotonic)
    unanswered: int = 0

    @property
    def under_way(self) -> int:
        """Batches that the rank has not acknowledged."""
        return self.sent - self.used

    def may_send(self, size: int) -> bool:
        """Within the credit, or, if nothing is under way, any size: one batch may be larger than all the credit."""
        credit = self.limit - (self.sent_bytes - self.used_bytes)
        return self.under_way == 0 or (size <= credit and self.under_way < MAX_UNDER_WAY)

    def take_waiting(self, size: int) -> list[Any]:
        """The frames of the batch that waits, `size` bytes, which count as sent from now on."""
        assert self.waiting is not None
        frames, self.waiting = self.waiting, None
        self.sent += 1
        self.sent_bytes += size
        return frames

    def acknowledge(self, ack: Ack) -> None:
        """Take note of what the rank has used. An ack of an earlier session says nothing about this one."""
        self.unanswered = 0
        if ack.session == self.session:
            self.used = min(max(self.used, ack.sequence + 1), self.sent)
            self.used_bytes = min(max(self.used_bytes, ack.credit), self.sent_bytes)

    def next_heartbeat(self) -> float:
        """When one is due, unless something else is sent before, in seconds of the monotonic clock."""
        return self.spoken + HEARTBEAT_SECONDS if self.unanswered < MAX_HEARTBEATS else float("inf")

    def heartbeat(self, refused: int) -> Heartbeat | End:
        """What to say when nothing else was said for a while; to a rank at its end, the end once more."""
        self.unanswered += 1
        if self.ended:
            return End(session=self.session, sequence=self.sent)
        return Heartbeat(session=self.session, sequence=self.sent, refused=refused)
