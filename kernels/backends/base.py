"""What an attention back end is: a pair of functions on packed rows, and a word on what it cannot do.

Everything else rests on that pair: a pack of documents is one call, a query chunk and the keys that a ring brought it
another, and a ring's backward needs nothing more, since the backward half takes the whole row's output and log-sum-exp
over whatever keys it is called with.

Shapes: Tq query rows and Tk key rows in N segments each, Hq query heads, Hk key and value heads (Hk divides Hq), D head
width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Which query rows and which key rows belong together: those of segment i are cu_q[i] to cu_q[i + 1] of q, and
    cu_k[i] to cu_k[i + 1] of k and v. Both are int32 [N + 1] on the tensors' device, from 0, never falling. max_q,
    max_k: at least the longest segment's rows, plain ints so that nothing waits for a device."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of_themselves(cls, cu_seqlens: Tensor, longest: int) -> Segments:
        """Segments whose queries and keys are the same rows."""
        return cls(cu_seqlens, cu_seqlens, longest, longest)


class Rule(NamedTuple):
    """Which keys of its segment a row sees, and what scores are multiplied by.

    Row r of Lq queries stands at position p = r + Lk − Lq among Lk keys: the last query beside the last key
    (FlashAttention's bottom-right alignment). With causal it sees keys up to p. window (at least 1, None for no limit)
    leaves the keys j with p − j < window, and without causal |p − j| < window.
    """

    causal: bool
    window: int | None
    scale: float


class BlockForward(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
        """Attend the queries of segment i to the keys of segment i: (out [Tq, Hq, D] in q's dtype, lse [Hq, Tq]).

        q [Tq, Hq, D], k and v [Tk, Hk, D]; query head h reads key head h // (Hq / Hk).

        lse is the natural log of the sum of exp(scale · q·k) over the keys a row sees, float32, or float64 for float64
        inputs. A row that sees no key has out 0 and lse −inf, the neutral element of merging; so have rows past the
        last segment, whatever they hold. Inputs may have any strides, and may not be written to.
        """


class BlockBackward(Protocol):
    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        rule: Rule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients over the pairs of this call: (dq [Tq, Hq, D], dk [Tk, Hk, D], dv [Tk, Hk, D]), in the dtypes of q,
        k and v.

        dout, out [Tq, Hq, D] and lse [Hq, Tq] belong to the whole row, over all keys that it sees in any call; then dq
        summed over calls with its other keys, dk and dv summed over calls with their other queries are the gradients
        of the undivided attention (FlashAttention-2, Dao 2023, section 3.1.2). Rows that see, or are seen by, nothing
        have gradient 0, and so have rows past the last segment.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a call asks of a back end. rings: whether it must take part in sums over other calls, with the log-sum-exp
    of all of them. gradient: whether a backward pass may follow."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None
    rings: bool
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """refusal: why it cannot honour a request, or None; it must not import anything heavy to say that a library is not
    installed. The pair is called only with what `refusal` let pass."""

    forward: BlockForward
    backward: BlockBackward
    refusal: Callable[[Request], str | None]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log-sum-exps and of sums over calls: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
