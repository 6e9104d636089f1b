"""Selective activation offload: a share of a micro-batch's activations is moved to the host, so that it holds more.

Moving takes time in proportion to tokens, attention in proportion to their square, so what is offloaded of a long
document costs nothing as long as its compute hides the copies. That shrinks the smallest ring that holds it (ByteScale,
arXiv 2502.21231, section 5.2): a ring of D members wants a share r for which the memory fits and the copies are hidden.
Shares are integers in 1/256. Nothing is moved here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import largest_document, piece_tokens, smallest_rings

WHOLE = 256  # a share of everything
KEPT_LAYERS = 2  # the last layer's activations are used at once, one more layer's are on the way
AT_A_TIME = 1 << 16  # documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """layers: of one rank (one pipeline stage). token_cost: so much of a micro-batch's time, in the unit of the cost
    model, must there be for each of its tokens, to hide the copies of all activations to the host and back."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    layers: int
    token_cost: int

    def __post_init__(self) -> None:
        if self.layers <= KEPT_LAYERS:
            raise ValueError(f"layers is {self.layers}: offload keeps {KEPT_LAYERS} of them, there must be more")
        if self.token_cost < 1:
            raise ValueError(f"token_cost is {self.token_cost}: must be at least 1")


def memory_tokens(tokens: Int64Array, share: Int64Array, layers: int) -> Int64Array:
    """As how many tokens a micro-batch counts of which this share is offloaded, rounded up."""
    kept = KEPT_LAYERS * WHOLE + (WHOLE - share) * (layers - KEPT_LAYERS)
    return np.asarray(-(-tokens * kept // (layers * WHOLE)), np.int64)


def share_needed(tokens: Int64Array, capacity: int, layers: int) -> Int64Array:
    """The least share with which micro-batches of so many tokens fit the capacity; over `WHOLE` where none does."""
    spare = layers * WHOLE * capacity // np.maximum(tokens, 1) - KEPT_LAYERS * WHOLE
    share = WHOLE - spare // (layers - KEPT_LAYERS)
    return np.asarray(np.where(tokens > capacity, np.where(spare < 0, WHOLE + 1, share), 0), np.int64)


def share_hidden(tokens: Int64Array, time: Int64Array, offload: Offload) -> Int64Array:
    """The largest share whose copies end within the time of the micro-batch."""
    return np.minimum(time * WHOLE // np.maximum(offload.token_cost * tokens, 1), WHOLE)


def smallest_offloaded_rings(lengths: Int64Array, capacity: int, cost: CostModel, offload: Offload) -> Int64Array:
    """The smallest ring of each document that holds it with an offload that its own compute hides."""
    rings = smallest_rings(lengths, capacity)
    for document in np.flatnonzero(rings > 1):
        sizes = np.arange(1, rings[document] + 1)
        fits = _fits(np.full(len(sizes), lengths[document]), sizes, capacity, cost, offload)
        rings[document] = sizes[fits][0] if fits.any() else rings[document]
    return rings


def largest_offloaded_document(ranks: int, capacity: int, cost: CostModel, offload: Offload, wanted: int) -> int:
    """Every document of at most this many tokens fits a ring of at most `ranks`, offloaded or not; not more than
    `wanted` is looked for.

    A document that is longer has more to offload and more compute to hide it, so that one may fit where a shorter one
    does not: all lengths are looked at. No smaller ring holds what the whole mesh does not: its members have more
    tokens, and no more compute for each.
    """
    start = largest_document(ranks, capacity)
    while start < wanted:
        lengths = np.arange(start + 1, min(start + AT_A_TIME, wanted) + 1)
        fits = smallest_rings(lengths, capacity) <= ranks
        fits |= _fits(lengths, np.full_like(lengths, ranks), capacity, cost, offload)
        if not fits.all():
            return start + int(np.argmin(fits))
        start += len(lengths)
    return start


def _fits(
    lengths: Int64Array, sizes: Int64Array, capacity: int, cost: CostModel, offload: Offload
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether documents fit rings of these sizes with an offload that their own compute hides."""
    first = np.zeros_like(lengths)
    tokens = piece_tokens(lengths, sizes, first) + 1  # another member may have one more
    time = cost.of_pieces(lengths, sizes, first)
    return np.asarray(share_needed(tokens, capacity, offload.layers) <= share_hidden(tokens, time, offload))
