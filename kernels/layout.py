"""The layout of a packed micro-batch: where each document's segment begins and ends.

Boundaries are explicit from the packer to the kernel; nothing here or below guesses them from positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """N segments in T packed rows: segment i is rows cu_seqlens[i] to cu_seqlens[i + 1].

    cu_seqlens: [N + 1] int32, starting at 0, never falling; rows from cu_seqlens[-1] to T are padding.
    max_seqlen: length of the longest segment, a plain int so that no kernel waits for the device to learn it.
    """

    cu_seqlens: Tensor
    max_seqlen: int
