"""How far attention is from what it should be: outputs and gradients beside those in float64 over a dense mask.

Inputs are rounded to the dtype first, so what is measured is the arithmetic, not the rounding of what it is given. An
error is the largest difference over the largest expected value; the mean is that of absolute differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from seqmesh.benchmarks.attention_cases import (
    Attend,
    dtype_name,
    forward_backward,
    layout_of,
    ours,
    random_rows,
    tail_documents,
)
from seqmesh.benchmarks.baselines.attention import loop
from seqmesh.benchmarks.harness import Results, Row, Spread, ratio, row
from seqmesh.kernels.backends import reference
from seqmesh.kernels.backends.base import Rule, Segments

NAMES = ("out", "dq", "dk", "dv")
UNIT = "of the largest value"
DTYPES = (torch.float32, torch.bfloat16)


def errors(tokens: int) -> Results:
    """Ours and the loop, in both dtypes, over documents of a long tail."""
    lengths = tail_documents(tokens, seed=29).tolist()
    results = Results()
    for dtype in DTYPES:
        rows = random_rows(sum(lengths), dtype)
        expected = in_float64(lengths, rows)
        case = f"error of {tokens} tokens, {dtype_name(dtype)}"
        mine, looped = (_error(case, name, attend, rows, expected) for name, attend in _candidates(lengths))
        results += Results(rows=(mine, looped), ratios=(ratio("error_vs_loop", mine, looped),))
    return results


def in_float64(lengths: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
    """Output, dq, dk and dv as they should be."""
    q, k, v, dout = (x.detach().double() for x in rows)
    segments = Segments.of_themselves(layout_of(lengths).cu_seqlens, max(lengths))
    rule = Rule(causal=True, window=None, scale=1 / math.sqrt(q.shape[2]))
    out, lse = reference.forward(q, k, v, segments, rule)
    gradients = reference.backward(dout, q, k, v, out, lse, segments, rule)
    return [out, *gradients]


def _candidates(lengths: Sequence[int]) -> tuple[tuple[str, Attend], ...]:
    return ("seqmesh", ours(lengths)), ("loop", loop(lengths))


def _error(case: str, name: str, attend: Attend, rows: Sequence[Tensor], expected: Sequence[Tensor]) -> Row:
    got = forward_backward(attend, rows)
    counts = {}
    for of, mine, right in zip(NAMES, got, expected, strict=True):
        counts[of] = relative_error(mine, right, right)
        counts[f"{of}_mean"] = float((mine.double() - right).abs().mean())
    return error_row(case, name, counts)


def relative_error(got: Tensor, expected: Tensor, whole: Tensor) -> float:
    """The largest difference over the largest value of the whole, of which `expected` may be a part."""
    return float((got.double() - expected.double()).abs().max() / whole.double().abs().max())


def error_row(case: str, name: str, counts: dict[str, float]) -> Row:
    """Its value is the worst of the four."""
    return row(case, name, Spread.of([max(counts[of] for of in NAMES)]), UNIT, **counts)
