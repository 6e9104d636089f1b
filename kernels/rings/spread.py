"""Attention of a pack some of whose documents are spread over ranks: whole ones here, the others with their rings.

A document of a ring of D is cut into 2D chunks; member i holds chunks i and 2D − 1 − i, the early one first, as one
segment of its pack. How a member comes by the others' keys is an exchange: `circuit` passes blocks round the ring,
`gather` fetches them from their owners; `choose` says which. Local documents lie in runs between the pieces
(`local`), and are computed while the first messages are under way.

Nothing can deadlock, whichever exchanges meet in a micro-batch. All messages have one order, by (wave; layer and pass;
first batches or later ones; ring; step), and these hold:

1. Both ends put a message at the same place: all members meet a ring in the same wave, all ranks list rings in the same
   order, and all members of a ring choose the same exchange for it. Its first batch is its first step or all that it
   gathers, its later ones the steps from the second on, each followed by the gradients of the step before, or the
   gradients that it gathered.
2. A rank posts its batches in that order, and waits for nothing but what it has posted.

Take the first message, in that order, that is not yet delivered. All batches that its two ends posted before the one
that holds it are complete, so neither end waits, on the host or in its stream of batches, for anything that comes
before; so both have posted it or are on the way there, and it is delivered. Ranks may run other waves, or none, between
two that they share. The condition is that every member runs every layer forward and backward, also a member whose piece
is empty or has nothing to learn.

The arithmetic is a back end's: its pair comes as an argument. No autograd here.

Shapes: T packed rows, Hq query heads, Hk key and value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqmesh.kernels.backends.base import BlockBackward, BlockForward, Rule, Segments, statistics_dtype
from seqmesh.kernels.layout import Layout, Ring
from seqmesh.kernels.rings.choose import choose
from seqmesh.kernels.rings.circuit import Circuit
from seqmesh.kernels.rings.gather import Gather
from seqmesh.kernels.rings.local import local_runs


def spread_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    block: BlockForward,
    rule: Rule,
    exchange: str,
) -> tuple[Tensor, Tensor]:
    """Attend every row to its document, wherever that is: (out [T, Hq, D] in q's dtype, lse [Hq, T]).

    q [T, Hq, D], k and v [T, Hk, D]; lse as in `base.BlockForward`. Rows past the last segment have out 0
    and lse −inf, whatever they hold. exchange: "ring", "gather", or "auto" to choose for each ring. Bytes sent are
    added to layout.traffic. The arguments have passed `rings.checks`.
    """
    rings = [ring for ring in layout.rings if ring.size > 1]
    if not rings:
        return block(q, k, v, Segments.of_themselves(layout.cu_seqlens, layout.max_seqlen), rule)
    started = [_start(ring, k, v, layout, rule, exchange) for ring in rings]
    out = q.new_zeros(q.shape)
    lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=statistics_dtype(q.dtype))
    for rows, segments in local_runs(layout, rings, len(q)):
        out[rows], lse[:, rows] = block(q[rows], k[rows], v[rows], segments, rule)
    for ring, keys in zip(rings, started, strict=True):
        keys.forward(q[ring.rows], out[ring.rows], lse[:, ring.rows], block)
    return out, lse


def spread_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    block: BlockBackward,
    rule: Rule,
    exchange: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq [T, Hq, D], dk and dv [T, Hk, D], in the inputs' dtypes) of `spread_forward`, which had the same
    arguments and gave out and lse. Rows past the last segment have gradient 0. Every member of a ring calls it, in the
    order of its forward passes or any other that is the same for all of them."""
    rings = [ring for ring in layout.rings if ring.size > 1]
    if not rings:
        return block(dout, q, k, v, out, lse, Segments.of_themselves(layout.cu_seqlens, layout.max_seqlen), rule)
    started = [_start(ring, k, v, layout, rule, exchange) for ring in rings]
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    for rows, segments in local_runs(layout, rings, len(q)):
        dq[rows], dk[rows], dv[rows] = block(
            dout[rows], q[rows], k[rows], v[rows], out[rows], lse[:, rows], segments, rule
        )
    coming = [
        keys.backward(dout[ring.rows], q[ring.rows], out[ring.rows], lse[:, ring.rows], dq[ring.rows], block)
        for ring, keys in zip(rings, started, strict=True)
    ]
    for ring, gradient in zip(rings, coming, strict=True):
        dk[ring.rows], dv[ring.rows] = gradient().unbind(dim=1)
    return dq, dk, dv


def _start(ring: Ring, k: Tensor, v: Tensor, layout: Layout, rule: Rule, exchange: str) -> Circuit | Gather:
    """Put a ring's first messages under way."""
    chosen = choose(
        exchange,
        size=ring.size,
        tokens=sum(ring.chunks),
        row_bytes=2 * k.shape[1] * k.shape[2] * k.element_size(),
        window=rule.window,
    )
    kind = Circuit if chosen == "ring" else Gather
    return kind(ring, k[ring.rows], v[ring.rows], rule, layout.traffic)
