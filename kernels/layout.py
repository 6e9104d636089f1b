"""The layout of a packed micro-batch: where each document's segment begins and ends, and which are spread over ranks.

Boundaries are explicit from the packer to the kernel; nothing here or below guesses them from positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A document that is spread over several ranks, as one of them sees it.

    segment: which segment of the layout holds this rank's piece. start: first row of that segment, a plain int so that
    nothing waits for the device to learn it. ranks [D]: members in order, as ranks of the standing process group.
    index: this rank's place among them. chunks [2D]: tokens of the document's chunks; member i holds chunk i and then
    chunk 2D − 1 − i.
    """

    segment: int
    start: int
    ranks: tuple[int, ...]
    index: int
    chunks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rows(self) -> slice:
        """The rows of this rank's piece."""
        return slice(self.start, self.start + self.held(self.index))

    def held(self, member: int) -> int:
        """Rows of a member's piece."""
        return self.chunks[member] + self.chunks[2 * self.size - 1 - member]


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank has sent to other members of rings so far: keys and values, forward and again backward, and
    gradients of both, counted once more by themselves."""

    sent: int = 0
    gradients: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """N segments in T packed rows: segment i is rows cu_seqlens[i] to cu_seqlens[i + 1].

    cu_seqlens: [N + 1] int32, starting at 0, never falling; rows from cu_seqlens[-1] to T are padding.
    max_seqlen: length of the longest segment, a plain int so that no kernel waits for the device to learn it.
    rings: the segments that are pieces of longer documents, in the order in which all ranks meet them.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    rings: tuple[Ring, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)
