"""`Reader`: what the loader process knows of one process that reads. No sockets; `service` owns one per connection.

None of it needs to outlive the connection: a rank that is forgotten says hello again and names its position.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from seqmesh.loader.arena import Slot
from seqmesh.loader.feed import Draft, Position
from seqmesh.loader.wire import End, Heartbeat, Hello, Transport

MAX_UNDER_WAY = 256  # batches; bounds the read-ahead of very small ones, of which the credit would allow thousands
HEARTBEAT_SECONDS = 1.0
MAX_HEARTBEATS = 60  # in a row to a rank that says nothing, so that the queue of a stopped one does not grow for ever


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch under way: its bytes and tokens, and its slot where it lies in a ring. begins: the step that it is the
    rank's first batch of, −1 for another one."""

    size: int
    tokens: int
    slot: Slot | None
    begins: int = -1


@dataclass(slots=True, eq=False, kw_only=True)
class Reader:
    """A process that is being served: where it is, how many bytes it will still take, what it has not let go of.

    identity: of its connection. client: the name that it gave itself. peer, peers: which of its rank's processes it is.
    limit: bytes that may be under way. sequence: number of the next batch; got: of the first that the rank has not
    acknowledged. under_way: by sequence, what was sent and is not let go of, `used` bytes in all. waiting: the next
    batch while it waits for credit. pidfd: of the process, −1 where unknown. spoken: when something was last sent to
    it, in seconds of the monotonic clock. unanswered: heartbeats since it last spoke. step: of the batch that was last
    sent in this session, −1 before. continued: whether another loader process served it before this one.
    """

    identity: bytes
    client: str
    rank: int
    peer: int
    peers: int
    position: Position
    session: int = 0
    sequence: int = 0
    transport: Transport = "zmq"
    limit: int = 0
    got: int = 0
    under_way: dict[int, Sent] = field(default_factory=dict)
    used: int = 0
    waiting: Draft | None = None
    ended: bool = False
    pidfd: int = -1
    spoken: float = field(default_factory=time.monotonic)
    unanswered: int = 0
    step: int = -1
    continued: bool = False

    @property
    def name(self) -> str:
        return reader_name(self.rank, self.peer, self.peers)

    @property
    def has_all(self) -> bool:
        """Whether it has got all that was sent: it may be waiting for the next batch, whatever it still uses."""
        return self.got == self.sequence

    def begin(self, hello: Hello, position: Position) -> None:
        """A session begins at a position."""
        self.session, self.sequence, self.got = hello.session, hello.sequence, hello.sequence
        self.position, self.limit, self.transport = position, hello.credit, hello.transport
        self.waiting, self.ended, self.step = None, False, -1

    def may_send(self, size: int) -> bool:
        """Within the credit, or, if nothing is under way, any size: one batch may be larger than all the credit."""
        if not self.under_way:
            return True
        return self.used + size <= self.limit and len(self.under_way) < MAX_UNDER_WAY

    def note_sent(self, sent: Sent, position: Position) -> None:
        """The next batch is under way, and the one at `position` is the next."""
        self.under_way[self.sequence] = sent
        self.used += sent.size
        self.sequence += 1
        self.position = position
        self.waiting = None

    def acknowledge(self, before: int) -> list[Sent]:
        """The rank has got the batches numbered below `before`: those that it had not acknowledged yet."""
        new = [self.under_way[n] for n in range(self.got, min(before, self.sequence)) if n in self.under_way]
        self.got = max(self.got, min(before, self.sequence))
        return new

    def unacknowledged(self) -> list[Sent]:
        """What was sent and has not come, as far as the rank has told."""
        return [sent for number, sent in self.under_way.items() if number >= self.got]

    def let_go(self, before: int, held: Iterable[int] = ()) -> list[Sent]:
        """What the rank lets go of: all batches numbered below `before`, but for those it holds."""
        kept = set(held)
        gone = [self.under_way.pop(n) for n in list(self.under_way) if n < before and n not in kept]
        self.used -= sum(sent.size for sent in gone)
        return gone

    def next_heartbeat(self) -> float:
        """When one is due, unless something else is sent before, in seconds of the monotonic clock."""
        return self.spoken + HEARTBEAT_SECONDS if self.unanswered < MAX_HEARTBEATS else float("inf")

    def heartbeat(self, refused: int) -> Heartbeat | End:
        """What to say when nothing else was said for a while; to a rank at its end, the end once more."""
        self.unanswered += 1
        if self.ended:
            return End(session=self.session, sequence=self.sequence)
        return Heartbeat(session=self.session, sequence=self.sequence, refused=refused)


def reader_name(rank: int, peer: int, peers: int) -> str:
    """For people: the rank, and which of its processes where there are several."""
    return f"rank {rank}" if peers == 1 else f"rank {rank}, peer {peer}"
