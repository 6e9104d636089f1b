"""The exchange that gathers: each member fetches all keys that it sees, straight from their owners, in one batch.

They stand beside its own in the document's order (`seqmesh.kernels.rings.reach`), so each of its two chunks is one call
of a back end and nothing is merged: the arithmetic, rounding included, is that of an undivided document. With a window
only the keys just before a chunk are fetched, its halo. Backward fetches them again rather than keep them; gradients of
fetched keys go straight home in the dtype of statistics, and are added there in the order of the members.

It costs one message's delay, and memory for all keys that are seen; it hides only behind what else the pack computes.

Shapes: n rows of the member's piece, m gathered rows, Hq query heads, Hk key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from seqmesh.kernels.backends.base import BlockBackward, BlockForward, Rule, statistics_dtype
from seqmesh.kernels.layout import Ring, Traffic
from seqmesh.kernels.rings.messages import Messages, exchange
from seqmesh.kernels.rings.reach import reach_of
from seqmesh.kernels.rings.segment import attend, attend_backward

Slices = tuple[slice, ...]


class Gather:
    """One ring's keys as one member sees them; made with their exchange under way, used once."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor, rule: Rule, traffic: Traffic) -> None:
        """k, v [n, Hk, D]: those of the member's piece."""
        self._ranks, self._rule, self._traffic = ring.ranks, rule, traffic
        self._reach = reach_of(ring, causal=rule.causal, window=rule.window)
        self._own = torch.stack((k, v), dim=1)  # k beside v: one message carries both
        self._coming = self._exchange(self._own, self._reach.sent, self._reach.received)
        traffic.sent += self._coming.bytes_sent

    def forward(self, q: Tensor, out: Tensor, lse: Tensor, block: BlockForward) -> None:
        """Fill out [n, Hq, D] and lse [Hq, n] for the queries q [n, Hq, D] of the piece."""
        k, v = self._gathered().unbind(dim=1)
        for rows, keys in self._reach.calls:
            out[rows], lse[:, rows] = attend(block, q[rows], k[keys], v[keys], self._rule)

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dq: Tensor, block: BlockBackward
    ) -> Callable[[], Tensor]:
        """Fill dq [n, Hq, D] and send others' gradients home. dout, q, out, lse: of the piece, as forward left them.

        What it returns waits for the others, and gives the gradient of the piece's keys, dk beside dv [n, 2, Hk, D].
        """
        gathered = self._gathered()
        k, v = gathered.unbind(dim=1)
        sums = torch.zeros_like(gathered, dtype=statistics_dtype(gathered.dtype))
        for rows, keys in self._reach.calls:
            dq[rows], *parts = attend_backward(
                block, dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], self._rule
            )
            for total, part in zip(sums[keys].unbind(dim=1), parts, strict=True):
                total += part
        coming = self._exchange(sums, self._reach.received, self._reach.sent)
        self._traffic.sent += coming.bytes_sent
        self._traffic.gradients += coming.bytes_sent
        return partial(self._collect, _joined(sums, self._reach.own), coming)

    def _collect(self, own: Tensor, coming: Messages) -> Tensor:
        for slices, message in zip(filter(None, self._reach.sent), coming.wait(), strict=True):
            for rows, part in _split(message, slices):
                own[rows] += part
        return own

    def _gathered(self) -> Tensor:
        """All keys that the member sees, k beside v: [m, 2, Hk, D]."""
        gathered = self._own.new_empty(self._reach.keys, *self._own.shape[1:])
        arrived = zip(filter(None, self._reach.received), self._coming.wait(), strict=True)
        for slices, message in [(self._reach.own, self._own), *arrived]:
            for rows, part in _split(message, slices):
                gathered[rows] = part
        return gathered

    def _exchange(self, rows: Tensor, send: Sequence[Slices], receive: Sequence[Slices]) -> Messages:
        """Start sending each member the named rows, and receiving as many from each as are named for it."""
        sent = [(_joined(rows, slices), rank) for rank, slices in zip(self._ranks, send, strict=True) if slices]
        awaited = [(sum(_sizes(slices)), rank) for rank, slices in zip(self._ranks, receive, strict=True) if slices]
        return exchange(sent, [(rows.new_empty(count, *rows.shape[1:]), rank) for count, rank in awaited])


def _sizes(slices: Slices) -> list[int]:
    return [rows.stop - rows.start for rows in slices]


def _joined(rows: Tensor, slices: Slices) -> Tensor:
    """The named rows, one after the other; no copy where they are contiguous."""
    return rows[slices[0]] if len(slices) == 1 else torch.cat([rows[:0], *(rows[part] for part in slices)])


def _split(message: Tensor, slices: Slices) -> Iterator[tuple[slice, Tensor]]:
    """The opposite of `_joined`: where each part of a message belongs."""
    return zip(slices, message.split_with_sizes(_sizes(slices)), strict=True)
