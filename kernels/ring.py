"""Attention to keys on other ranks: k and v of a document that is spread over a ring go round it, block by block.

A document of a ring of D is cut into 2D chunks; member i holds chunks i and 2D − 1 − i, the early one first, as one
segment of its pack. Attention inside the segment is plain packed attention, causal by row: its rows are in the order of
the document. This module adds the other members' keys. Step s = 1..D−1 brings member i the block (k and v) of member
j = i + s (mod D), from member i + 1; each sees, with causal attention,

    from j > i: both chunks, for its late queries      from j < i: the early chunk, for all its queries

Blocks go downwards, from i to i − 1, so that a block meets those who see all of it before those who see its early chunk
only: a message holds just what its receiver sees, the early rows being a prefix. Backward sends the blocks round again.
The gradient of each row goes with the block, one step behind it, and grows; from the last member that sees the row it
goes straight home. Every sum has one order, so results are the same bits in every run.

Messages are batched point-to-point on the standing default process group; no group is ever made. The next block is
under way while the present one is computed, and the first ones while the pack is. Nothing can deadlock: all messages
have one total order, by (wave; layer and pass; first block or later; ring; step), every rank posts and awaits its own
in that order, and both ends put a message at the same place, because all members meet a ring in the same wave and all
ranks list rings in the same order. So whoever waits for the earliest message gets it: its other end can be waiting for
nothing but an earlier one. Ranks may run other waves, or none, between two that they share. The condition is that every
member runs every layer forward and backward, also a member whose piece is empty or has nothing to learn.

The arithmetic is a back end's: its block pair comes as an argument. No sliding window, no autograd here.

Shapes: T packed rows, n rows of a block, Hq query heads, Hk key and value heads, D head width (or ring size, in prose).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from seqmesh.kernels.layout import Ring, Traffic

Rows = tuple[Tensor, int]  # a contiguous tensor and the rank that sends or receives it


def check_rings(rings: Sequence[Ring], bounds: Sequence[int]) -> None:
    """Raise ValueError for rings that contradict the segment bounds, themselves, or the process group.

    RuntimeError where a ring of several ranks meets no process group. Whether members agree is not checked: that needs
    messages, and the plan's validator sees to it.
    """
    segments = len(bounds) - 1
    for i, ring in enumerate(rings):
        name = f"rings[{i}]"
        if len(set(ring.ranks)) != ring.size or ring.size == 0:
            raise ValueError(f"{name}.ranks is {ring.ranks}: must be distinct ranks, at least one")
        if not 0 <= ring.index < ring.size:
            raise ValueError(f"{name}.index is {ring.index}: must be from 0 to {ring.size - 1}")
        if len(ring.chunks) != 2 * ring.size or min(ring.chunks) < 0:
            raise ValueError(f"{name}.chunks is {ring.chunks}: must be {2 * ring.size} sizes, none negative")
        if not 0 <= ring.segment < segments:
            raise ValueError(f"{name}.segment is {ring.segment}: the layout has {segments} segments")
        rows, held = bounds[ring.segment + 1] - bounds[ring.segment], _piece(ring, ring.index)
        if rows != held:
            raise ValueError(f"{name}: segment {ring.segment} has {rows} rows, its two chunks have {held}")
        if ring.size > 1:
            _check_group(name, ring)
    if len({ring.segment for ring in rings}) != len(rings):
        raise ValueError(f"rings have segments {[ring.segment for ring in rings]}: must be distinct")


def _check_group(name: str, ring: Ring) -> None:
    if not dist.is_initialized():
        raise RuntimeError(f"{name} has {ring.size} ranks and there is no process group: initialise it first")
    if not 0 <= min(ring.ranks) <= max(ring.ranks) < dist.get_world_size():
        raise ValueError(f"{name}.ranks is {ring.ranks}: the process group has ranks 0 to {dist.get_world_size() - 1}")
    if ring.ranks[ring.index] != dist.get_rank():
        raise ValueError(f"{name}: member {ring.index} of {ring.ranks} is not this rank, {dist.get_rank()}")


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of rows over two disjoint sets of keys -> over both. out [n, Hq, D], lse [n, Hq].

    The larger lse is taken out before exponentials, so no score overflows. lse −inf marks a row without keys, whose out
    is 0; with −inf on both sides the result is such a row again. FlashAttention-2 (Dao 2023), section 3.1.
    """
    largest = torch.maximum(lse_a, lse_b)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)  # −inf − (−inf) is NaN
    weight_a, weight_b = (lse_a - largest).exp(), (lse_b - largest).exp()
    total = weight_a + weight_b
    share = total.masked_fill(total == 0, 1.0)
    out = out_a * (weight_a / share).unsqueeze(-1) + out_b * (weight_b / share).unsqueeze(-1)
    return out, largest + total.log()


def visible_block(ring: Ring, member: int, owner: int, causal: bool) -> tuple[int, int]:
    """What `member` computes with the block of another member: (its first query row, number of the block's key rows).

    All its queries from that row on see all those keys.
    """
    if not causal:
        return 0, _piece(ring, owner)
    return (ring.chunks[member], _piece(ring, owner)) if owner > member else (0, ring.chunks[owner])


def _piece(ring: Ring, member: int) -> int:
    return ring.chunks[member] + ring.chunks[2 * ring.size - 1 - member]


@dataclass(frozen=True, slots=True)
class _Messages:
    """Messages under way. Buffers must live, and those to send keep their values, until `wait` returns."""

    works: list[dist.Work]
    sent: list[Rows]
    received: list[Rows]

    def wait(self) -> list[Tensor]:
        """The received buffers, in the order given."""
        for work in self.works:
            work.wait()
        return [rows for rows, _ in self.received]


def _exchange(send: list[Rows], receive: list[Rows], traffic: Traffic) -> _Messages:
    """Start one batch. Messages without rows are not sent: both ends know their size."""
    operations = [dist.P2POp(dist.isend, rows, peer) for rows, peer in send if rows.numel()]
    operations += [dist.P2POp(dist.irecv, rows, peer) for rows, peer in receive if rows.numel()]
    traffic.sent += sum(rows.numel() * rows.element_size() for rows, _ in send)
    return _Messages(dist.batch_isend_irecv(operations) if operations else [], send, receive)


class Circuit:
    """One ring's blocks on their way round, as one member sees it; made with the first exchange under way.

    Iterate once: step s gives (queries, owner, block), the rows of the pack that see the block, its owner's index, and
    the block [n, 2, Hk, D] of k and v, early chunk first, as far as this member sees it.
    """

    def __init__(self, ring: Ring, start: int, k: Tensor, v: Tensor, causal: bool, traffic: Traffic) -> None:
        """start: first row of the member's segment in k and v [T, Hk, D]."""
        self.ring = ring
        self.rows = slice(start, start + _piece(ring, ring.index))
        self.traffic = traffic
        self._causal = causal
        # k beside v, row by row: any first rows of a block are contiguous, hence one message.
        self._own = torch.stack((k[self.rows], v[self.rows]), dim=1)
        self._coming = self._pass_on(1, self._own)

    def __iter__(self) -> Iterator[tuple[slice, int, Tensor]]:
        for step in range(1, self.ring.size):
            (block,) = self._coming.wait()
            self._coming = self._pass_on(step + 1, block)
            owner = self.member(step)
            first, _ = visible_block(self.ring, self.ring.index, owner, self._causal)
            yield slice(self.rows.start + first, self.rows.stop), owner, block

    def member(self, distance: int) -> int:
        """Index of the member `distance` places up the ring."""
        return (self.ring.index + distance) % self.ring.size

    def seen(self, member: int, owner: int) -> int:
        """How many rows of the owner's block `member` gets: those that it sees. The owner gets none."""
        return 0 if member == owner else visible_block(self.ring, member, owner, self._causal)[1]

    def _pass_on(self, step: int, held: Tensor) -> _Messages:
        """Start what brings the block of this step and hands on the one of the step before; nothing after the last."""
        if step >= self.ring.size:
            return _Messages([], [], [])
        ranks, below, above = self.ring.ranks, self.member(-1), self.member(1)
        send = held[: self.seen(below, self.member(step - 1))]
        receive = held.new_empty(self.seen(self.ring.index, self.member(step)), *held.shape[1:])
        return _exchange([(send, ranks[below])], [(receive, ranks[above])], self.traffic)


def start_circuits(
    k: Tensor, v: Tensor, rings: Sequence[Ring], bounds: Sequence[int], traffic: Traffic, *, causal: bool
) -> list[Circuit]:
    """Put the first exchange of every ring under way, in order: pack, then finish them in the same order."""
    return [Circuit(ring, bounds[ring.segment], k, v, causal, traffic) for ring in rings if ring.size > 1]


def finish_forward(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    circuits: Sequence[Circuit],
    block_forward: Callable[..., tuple[Tensor, Tensor]],
    scale: float,
) -> None:
    """Extend out [T, Hq, D] and lse [T, Hq], each row so far over its own segment, to all keys of spread documents.

    q [T, Hq, D]. Sums are kept in lse's dtype, and rounded once to out's.
    """
    for circuit in circuits:
        start, total = circuit.rows.start, out[circuit.rows].to(lse.dtype)
        for queries, _, block in circuit:
            k, v = block.unbind(dim=1)
            part, part_lse = block_forward(q[queries], k, v, causal=False, scale=scale)
            late = slice(queries.start - start, None)
            total[late], lse[queries] = merge(total[late], lse[queries], part, part_lse)
        out[circuit.rows] = total


def finish_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    circuits: Sequence[Circuit],
    block_backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    scale: float,
) -> None:
    """Extend dq, dk, dv, so far over pairs inside segments, by all pairs across ranks.

    gradients: dq [T, Hq, D], dk and dv [T, Hk, D], changed in place. saved: dout [T, Hq, D], q [T, Hq, D], and out
    [T, Hq, D], lse [T, Hq] over all keys. Sums are kept in lse's dtype, on the wire too, and rounded once.
    """
    dq, dk, dv = gradients
    dout, q, out, lse = saved
    for circuit in circuits:
        rows = circuit.rows
        dq_sum = dq[rows].to(lse.dtype)
        home = _HomeGoing(circuit, torch.stack((dk[rows], dv[rows]), dim=1).to(lse.dtype))
        for step, (queries, owner, block) in enumerate(circuit, start=1):
            k, v = block.unbind(dim=1)
            part, *dkv = block_backward(
                dout[queries], q[queries], k, v, out[queries], lse[queries], causal=False, scale=scale
            )
            dq_sum[queries.start - rows.start :] += part
            home.add(step, owner, torch.stack(dkv, dim=1).to(lse.dtype))
        dq[rows] = dq_sum
        dk[rows], dv[rows] = home.total().unbind(dim=1)


class _HomeGoing:
    """Gradients of a ring's blocks on their way to the owners, each row by way of all members that see it."""

    def __init__(self, circuit: Circuit, own: Tensor) -> None:
        """own: [n, 2, Hk, D], the gradient of this member's block from its own queries; the others' are added."""
        self._circuit = circuit
        self._own = own
        self._coming: _Messages | None = None
        self._returning = slice(0, 0)  # rows of the own block that come home with `_coming`

    def add(self, step: int, owner: int, part: Tensor) -> None:
        """Add this member's part [n, 2, Hk, D] to what came with the owner's block, and send the sum on."""
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
        self._coming = _exchange(send, receive, circuit.traffic)

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
