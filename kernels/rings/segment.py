"""One segment of queries and one of keys through a back end's pair: how parts of a spread document are attended."""

from __future__ import annotations

import torch
from torch import Tensor

from seqmesh.kernels.backends.base import BlockBackward, BlockForward, Rule, Segments, statistics_dtype


def attend(block: BlockForward, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """q [n, Hq, D], k and v [m, Hk, D] -> out [n, Hq, D], lse [Hq, n]. n or m may be 0: no back end is asked then."""
    if not len(q) or not len(k):
        return torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=statistics_dtype(q.dtype))
    return block(q, k, v, _one_segment(q, k), rule)


def attend_backward(
    block: BlockBackward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients over the pairs of this call: dq [n, Hq, D], dk and dv [m, Hk, D]."""
    if not len(q) or not len(k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return block(dout, q, k, v, out, lse, _one_segment(q, k), rule)


def _one_segment(q: Tensor, k: Tensor) -> Segments:
    return Segments(_bounds(q), _bounds(k), len(q), len(k))


def _bounds(rows: Tensor) -> Tensor:
    """[0, n], made on the device: copied there, it would make the host wait."""
    return torch.arange(2, dtype=torch.int32, device=rows.device) * len(rows)
