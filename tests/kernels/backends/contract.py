"""What every attention back end has to do (`seqmesh.kernels.backends.base`), as checks that take one: on any device.

The comparison is with `tests.kernels.reference`, in float64 on the CPU. A back end is only checked with what its
`refusal` lets pass: `request` says what a case asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments, statistics_dtype
from seqmesh.kernels.merge import merge
from tests.kernels.reference import leaves, reference_block, relative_error

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error of an output or a gradient, relative to its largest value (or 1, if that is more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call. key_lengths: keys of each segment, by default as many as queries. padding: rows of NaN after the last
    segment of queries and of keys. strided: q, k and v with strides of their own, not views of one projection."""

    lengths: Sequence[int]
    key_lengths: Sequence[int] | None = None
    heads: tuple[int, int] = (2, 1)
    width: int = 8
    padding: int = 0
    causal: bool = True
    window: int | None = None
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    strided: bool = False

    @property
    def keys(self) -> Sequence[int]:
        return self.lengths if self.key_lengths is None else self.key_lengths

    @property
    def scale(self) -> float:
        return 1.3 / math.sqrt(self.width)  # not what anyone takes unless told


Tensors = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, dout


def request(case: Case, *, rings: bool = True, gradient: bool = True) -> Request:
    """What the case asks of a back end."""
    return Request(
        device=torch.device(case.device),
        dtype=case.dtype,
        heads=case.heads[0],
        kv_heads=case.heads[1],
        head_dim=case.width,
        causal=case.causal,
        window=case.window,
        rings=rings,
        gradient=gradient,
    )


def check(backend: Backend, case: Case) -> None:
    """Output, log-sum-exp and gradients equal the reference's; rows past the segments are 0, and −inf."""
    tensors = random_tensors(case)
    out, lse = call_forward(backend, case, tensors)
    gradients = call_backward(backend, case, tensors, out, lse)
    q, k, v, _ = tensors
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == statistics_dtype(case.dtype)
    rows, keys = sum(case.lengths), sum(case.keys)
    for x, end in zip((out, *gradients), (rows, rows, keys, keys), strict=True):
        assert not x[end:].any(), "rows past the last segment are not 0"
    expected_out, expected_lse, expected_gradients = reference(case, tensors)
    assert torch.equal(lse.cpu() == -torch.inf, expected_lse == -torch.inf), "other rows see nothing"
    assert_close(case.dtype, out=(out, expected_out), lse=(finite(lse), finite(expected_lse)))
    assert_close(
        case.dtype, **dict(zip(("dq", "dk", "dv"), zip(gradients, expected_gradients, strict=True), strict=True))
    )


def check_split(backend: Backend, case: Case, early: Sequence[int]) -> None:
    """Keys in two calls, the first `early` of each segment in one, all others in the other: merged, the undivided
    attention; with the merged output and log-sum-exp, gradients that add up to the undivided ones.

    All rows must see all early keys: with causal there are no more early keys than there are keys before the rows.
    """
    q, k, v, dout = random_tensors(case)
    is_early = torch.tensor(
        [key < first for keys, first in zip(case.keys, early, strict=True) for key in range(keys)]
        + [False] * case.padding,
        dtype=torch.bool,
        device=q.device,
    )
    late = [keys - first for keys, first in zip(case.keys, early, strict=True)]
    parts = [(replace(case, key_lengths=early, causal=False), is_early), (replace(case, key_lengths=late), ~is_early)]
    halves = [call_forward(backend, part, (q, k[rows], v[rows], dout)) for part, rows in parts]
    wide, lse = merge(*halves[0], *halves[1])
    out = wide.to(q.dtype)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for part, rows in parts:
        part_dq, dk[rows], dv[rows] = (
            x.to(lse.dtype) for x in call_backward(backend, part, (q, k[rows], v[rows], dout), out, lse)
        )
        dq += part_dq
    expected_out, expected_lse, expected = reference(case, (q, k, v, dout))
    assert_close(case.dtype, out=(out, expected_out), lse=(finite(lse), finite(expected_lse)))
    assert_close(case.dtype, dq=(dq, expected[0]), dk=(dk, expected[1]), dv=(dv, expected[2]))


def visible_keys(backend: Backend, case: Case) -> list[int]:
    """How many keys each row sees: equal scores, and one-hot values that show which weights are not 0."""
    rows, keys = sum(case.lengths), sum(case.keys)
    q = torch.zeros(rows, case.heads[0], case.width, dtype=case.dtype, device=case.device)
    k = torch.randn(keys, case.heads[1], case.width, device=case.device).to(case.dtype)
    v = torch.eye(keys, case.width, dtype=case.dtype, device=case.device).unsqueeze(1).expand(k.shape).contiguous()
    assert keys <= case.width, "the values of a case have no column for each key"
    out, _ = call_forward(backend, case, (q, k, v, q))
    counts = (out > 0).sum(dim=2)
    assert bool((counts == counts[:, :1]).all()), "heads see different keys"
    return [int(count) for count in counts[:, 0]]


def random_tensors(case: Case) -> Tensors:
    """q, k, v and dout of a case: q as one of three views of a fused projection, or everything strided oddly."""
    generator = torch.Generator().manual_seed(sum(case.lengths) + 31 * sum(case.keys))

    def rows_of(lengths: Sequence[int], heads: int, spread: int) -> Tensor:
        shape = (sum(lengths) + case.padding, heads + spread, case.width)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x[sum(lengths) :] = math.nan
        x = x.to(device=case.device, dtype=case.dtype)
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)[:, :heads] if case.strided else x[:, :heads]

    q_heads, kv_heads = case.heads
    q, dout = rows_of(case.lengths, q_heads, 1), rows_of(case.lengths, q_heads, 0)
    return q, rows_of(case.keys, kv_heads, 1), rows_of(case.keys, kv_heads, 2), dout


def call_forward(backend: Backend, case: Case, tensors: Tensors) -> tuple[Tensor, Tensor]:
    q, k, v, _ = tensors
    return backend.forward(q, k, v, _segments(case), Rule(case.causal, case.window, case.scale))


def call_backward(
    backend: Backend, case: Case, tensors: Tensors, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, dout = tensors
    return backend.backward(dout, q, k, v, out, lse, _segments(case), Rule(case.causal, case.window, case.scale))


def reference(case: Case, tensors: Tensors) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(out, lse, (dq, dk, dv)) in float64 on the CPU. dout of the padding counts for nothing."""
    q, k, v, dout = leaves(*(x.cpu() for x in tensors))
    out, lse = reference_block(
        (q, k, v), case.lengths, case.keys, causal=case.causal, window=case.window, scale=case.scale
    )
    return out, lse, torch.autograd.grad(out, (q, k, v), dout.detach().nan_to_num(0.0))


def assert_close(dtype: torch.dtype, **pairs: tuple[Tensor, Tensor]) -> None:
    errors = {name: relative_error(got.cpu(), expected) for name, (got, expected) in pairs.items()}
    assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors  # an error of NaN is no small one


def finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _segments(case: Case) -> Segments:
    cu_q, cu_k = (
        torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=case.device)
        for lengths in (case.lengths, case.keys)
    )
    return Segments(cu_q, cu_k, max(case.lengths, default=0), max(case.keys, default=0))
