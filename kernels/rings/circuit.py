"""The exchange that goes round: blocks of keys and values pass from member to member until all who see them have.

Step s = 1..D−1 brings member i the block of member j = i + s (mod D), from member i + 1; each sees, with causal
attention,

    from j > i: both chunks, for its late queries      from j < i: the early chunk, for all its queries

Blocks go downwards, from i to i − 1, so that a block meets those who see all of it before those who see its early chunk
only: a message holds just what its receiver sees, the early rows being a prefix. (Where a document is so short that a
member's late chunk is empty, a block still passes through it.) Backward sends the blocks round again. The gradient of
each row goes with the block, one step behind it, and grows; from the last member that sees the row it goes straight
home. Every sum has one order, and is kept in the dtype of statistics, on the wire too.

It costs a message's delay per step and a merge per block; all that it moves hides behind the attention of one block,
and no member ever holds more than two blocks besides its own. No sliding window: `seqmesh.kernels.rings.gather` does.

Shapes: n rows of the member's piece, m rows of a block, Hq query heads, Hk key and value heads, D head width (or ring
size, in prose).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from seqmesh.kernels.backends.base import BlockBackward, BlockForward, Rule, statistics_dtype
from seqmesh.kernels.layout import Ring, Traffic
from seqmesh.kernels.merge import merge_
from seqmesh.kernels.rings.messages import Messages, exchange
from seqmesh.kernels.rings.segment import attend, attend_backward


def visible_block(ring: Ring, member: int, owner: int, causal: bool) -> tuple[int, int]:
    """What `member` computes with the block of another member: (its first query row, number of the block's key rows).

    All its queries from that row on see all those keys.
    """
    if not causal:
        return 0, ring.held(owner)
    return (ring.chunks[member], ring.held(owner)) if owner > member else (0, ring.chunks[owner])


class Circuit:
    """One ring's blocks as one member sees them; made with the first exchange under way, used once."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor, rule: Rule, traffic: Traffic) -> None:
        """k, v [n, Hk, D]: those of the member's piece."""
        self.ring, self.traffic = ring, traffic
        self._rule, self._full = rule, rule._replace(causal=False)
        # k beside v, row by row: any first rows of a block are contiguous, hence one message.
        self._own = torch.stack((k, v), dim=1)
        self._coming = self._pass_on(1, self._own)

    def forward(self, q: Tensor, out: Tensor, lse: Tensor, block: BlockForward) -> None:
        """Fill out [n, Hq, D] and lse [Hq, n] for the queries q [n, Hq, D] of the piece."""
        k, v = self._own.unbind(dim=1)
        first, lse[:] = attend(block, q, k, v, self._rule)  # its rows are in the order of the document
        total = first.to(lse.dtype)
        for rows, _, keys in self:
            k, v = keys.unbind(dim=1)
            merge_(total[rows], lse[:, rows], *attend(block, q[rows], k, v, self._full))
        out[:] = total

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dq: Tensor, block: BlockBackward
    ) -> Callable[[], Tensor]:
        """Fill dq [n, Hq, D] and send others' gradients on. dout, q, out, lse: of the piece, as forward left them.

        What it returns waits for the others, and gives the gradient of the piece's keys, dk beside dv [n, 2, Hk, D].
        """
        wide = statistics_dtype(q.dtype)
        k, v = self._own.unbind(dim=1)
        first, *own = attend_backward(block, dout, q, k, v, out, lse, self._rule)
        total = first.to(wide)
        home = _HomeGoing(self, torch.stack(own, dim=1).to(wide))
        for step, (rows, owner, keys) in enumerate(self, start=1):
            k, v = keys.unbind(dim=1)
            part, *parts = attend_backward(block, dout[rows], q[rows], k, v, out[rows], lse[:, rows], self._full)
            total[rows] += part
            home.add(step, owner, torch.stack(parts, dim=1).to(wide))
        dq[:] = total
        return home.total

    def __iter__(self) -> Iterator[tuple[slice, int, Tensor]]:
        """Once. Of each step (own query rows that see the block, its owner, the block [m, 2, Hk, D] as far as seen)."""
        for step in range(1, self.ring.size):
            (block,) = self._coming.wait()
            self._coming = self._pass_on(step + 1, block)
            owner = self.member(step)
            first, _ = visible_block(self.ring, self.ring.index, owner, self._rule.causal)
            yield slice(first, len(self._own)), owner, block

    def member(self, distance: int) -> int:
        """Index of the member `distance` places up the ring."""
        return (self.ring.index + distance) % self.ring.size

    def seen(self, member: int, owner: int) -> int:
        """How many rows of the owner's block `member` gets: those that it sees. The owner gets none."""
        return 0 if member == owner else visible_block(self.ring, member, owner, self._rule.causal)[1]

    def _pass_on(self, step: int, held: Tensor) -> Messages:
        """Start what brings the block of this step and hands on the one of the step before; nothing after the last."""
        if step >= self.ring.size:
            return exchange([], [])
        ranks, below, above = self.ring.ranks, self.member(-1), self.member(1)
        send = held[: self.seen(below, self.member(step - 1))]
        receive = held.new_empty(self.seen(self.ring.index, self.member(step)), *held.shape[1:])
        messages = exchange([(send, ranks[below])], [(receive, ranks[above])])
        self.traffic.sent += messages.bytes_sent
        return messages


class _HomeGoing:
    """Gradients of a ring's blocks on their way to the owners, each row by way of all members that see it."""

    def __init__(self, circuit: Circuit, own: Tensor) -> None:
        """own: [n, 2, Hk, D], the gradient of this member's block from its own queries; the others' are added."""
        self._circuit = circuit
        self._own = own
        self._coming: Messages | None = None
        self._returning = slice(0, 0)  # rows of the own block that come home with `_coming`

    def add(self, step: int, owner: int, part: Tensor) -> None:
        """Add this member's part [m, 2, Hk, D] to what came with the owner's block, and send the sum on."""
        passed = self._receive()
        if passed is not None:
            part = passed + part
        circuit = self._circuit
        ranks, mine = circuit.ring.ranks, circuit.ring.index
        onward = circuit.seen(circuit.member(-1), owner)
        send = [(part[:onward], ranks[circuit.member(-1)]), (part[onward:], ranks[owner])]
        # The same step seen from the other end: who has this member's block now, and what does the next not see?
        last = circuit.member(-step)
        self._returning = slice(circuit.seen(circuit.member(-step - 1), mine), circuit.seen(last, mine))
        following = part.new_empty(circuit.seen(mine, circuit.member(step + 1)), *part.shape[1:])
        receive = [(following, ranks[circuit.member(1)]), (torch.empty_like(self._own[self._returning]), ranks[last])]
        self._coming = exchange(send, receive)
        circuit.traffic.sent += self._coming.bytes_sent
        circuit.traffic.gradients += self._coming.bytes_sent

    def total(self) -> Tensor:
        """The own block's gradient when all members have added theirs."""
        self._receive()
        return self._own

    def _receive(self) -> Tensor | None:
        """Take home the own rows that have arrived; returns the gradient that came with the next block, if any."""
        if self._coming is None:
            return None
        passed, returned = self._coming.wait()
        self._own[self._returning] += returned
        return passed
