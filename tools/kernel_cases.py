"""Cases that show whether an attention back end keeps its contract, and the comparison with the formula in float64.

What `python -m seqmesh.tools.gpu_check` runs on the machine at hand. A case is small, and odd in one or two ways: empty
segments, one row, more queries than keys, windows, fewer key heads, strided tensors, and rows past the last segment,
which hold NaN, so that a back end that looks at them is found out.

Shapes: Tq query rows and Tk key rows, Hq and Hk heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqmesh.kernels.backends import reference
from seqmesh.kernels.backends.base import Backend, Request, Rule, Segments, statistics_dtype

# Largest difference over largest value, between arithmetic in a dtype and in float64 on the same inputs.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NEGLIGIBLE = 1.0  # as inputs are; where all values are below, they may be differences that cancelled
PARTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """query_lengths, key_lengths: rows of each segment. past: rows after the last. wide: q, k and v are views into one
    wider tensor a row, as a fused projection gives them."""

    name: str
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    past: int = 0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    causal: bool = True
    window: int | None = None
    wide: bool = False

    def request(self, device: torch.device, dtype: torch.dtype, *, rings: bool, gradient: bool) -> Request:
        return Request(
            device=device,
            dtype=dtype,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            window=self.window,
            rings=rings,
            gradient=gradient,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """q, dout [Tq, Hq, D], k, v [Tk, Hk, D], as `base.BlockForward` has them."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    segments: Segments

    def double(self) -> Inputs:
        return replace(self, dout=self.dout.double(), q=self.q.double(), k=self.k.double(), v=self.v.double())


def cases() -> list[Case]:
    """A pack under every mask, the odder shapes under some."""
    packs = (150, 1, 0, 37, 70)
    pack = Case(name="pack", query_lengths=packs, key_lengths=packs, past=29)
    shapes = (
        replace(pack, name="wide rows", wide=True),
        Case(name="as many key heads", query_lengths=(65, 130), key_lengths=(65, 130), kv_heads=4),
        Case(name="one key head, D = 128", query_lengths=(90, 3), key_lengths=(90, 3), kv_heads=1, head_dim=128),
        Case(name="late queries", query_lengths=(9, 70, 0, 1), key_lengths=(130, 70, 20, 60), past=3),
        Case(name="more queries than keys", query_lengths=(140, 4, 66), key_lengths=(20, 0, 65), past=3),
        Case(name="one query row each", query_lengths=(1, 0, 1), key_lengths=(140, 5, 1), past=2),
        Case(name="nothing but padding", query_lengths=(0, 0), key_lengths=(0, 0), past=7),
    )
    masks = ((True, None), (False, None), (True, 20), (False, 75))
    edges = ((False, 20), (True, 1), (False, 1), (True, 1000))
    return [replace(pack, causal=causal, window=window) for causal, window in masks + edges] + [
        replace(shape, causal=causal, window=window) for shape in shapes for causal, window in masks
    ]


def large_cases() -> list[Case]:
    """Segments of many tiles, for devices that are quick enough."""
    lengths = {"pack": ((1025, 3, 700, 0, 2048), (1025, 3, 700, 0, 2048)), "late queries": ((300, 1024), (2500, 1025))}
    return [
        Case(
            name=f"large, {name}, D = {head_dim}",
            query_lengths=queries,
            key_lengths=keys,
            past=77,
            heads=8,
            head_dim=head_dim,
            causal=causal,
            window=window,
        )
        for name, (queries, keys) in lengths.items()
        for head_dim in (64, 128, 256)
        for causal, window in ((True, None), (False, None), (True, 333), (False, 333))
    ]


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Normal numbers, from the CPU's generator whatever the device; NaN past the last segments."""
    generator = torch.Generator().manual_seed(seed)
    cu_q, cu_k = (_bounds(lengths, device) for lengths in (case.query_lengths, case.key_lengths))
    heads = (case.heads, case.heads, case.kv_heads, case.kv_heads)
    lengths = (case.query_lengths, case.query_lengths, case.key_lengths, case.key_lengths)
    tensors = [
        _rows(sum(rows) + case.past, count, case, generator).to(device, dtype)
        for rows, count in zip(lengths, heads, strict=True)
    ]
    for tensor, rows in zip(tensors, lengths, strict=True):
        tensor[sum(rows) :] = torch.nan
    dout, q, k, v = (_widened(tensor) if case.wide else tensor for tensor in tensors)
    segments = Segments(cu_q, cu_k, max(case.query_lengths), max(case.key_lengths))
    return Inputs(dout=dout, q=q, k=k, v=v, segments=segments)


def compare(backend: Backend, case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """For each of PARTS that the back end can give, the largest difference from the formula over its largest value.

    Infinite where rows that see, or are seen by, nothing are not exactly what the contract says, where a value is not
    finite that should be, or where a shape or dtype is wrong. Gradients also have to be right for rows that saw as much
    again elsewhere, where the back end takes part in rings; the larger difference counts. Parts that it refuses are not
    in the result.
    """
    inputs = make_inputs(case, device, dtype)
    scale = 1 / math.sqrt(case.head_dim)
    true = _forward(reference.BACKEND, case, inputs.double(), scale)
    got = _forward(backend, case, inputs, scale)
    blank_rows, blank_keys = _blank(case, inputs)
    errors = {
        "out": difference(got[0], true[0], dtype, blank_rows),
        "lse": difference(got[1].transpose(0, 1), true[1].transpose(0, 1), statistics_dtype(dtype)),
    }
    for out, lse in _whole_rows(backend, case, device, dtype, *true):
        grads = _backward(backend, case, inputs, out, lse, scale)
        true_grads = _backward(reference.BACKEND, case, inputs.double(), out, lse, scale)
        for name, a, b, blank in zip(PARTS[2:], grads, true_grads, (blank_rows, blank_keys, blank_keys), strict=True):
            errors[name] = max(errors.get(name, 0.0), difference(a, b, dtype, blank))
    return errors


def worst(errors: dict[str, float], dtype: torch.dtype) -> tuple[str, float] | None:
    """The part that is furthest off, with how far, or None where all are near enough for the dtype."""
    name, error = max(errors.items(), key=lambda item: item[1])
    return (name, error) if not error <= TOLERANCES[dtype] else None


def _forward(backend: Backend, case: Case, inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = inputs.q, inputs.k, inputs.v
    return backend.forward(q, k, v, inputs.segments, Rule(case.causal, case.window, scale))


def _backward(
    backend: Backend, case: Case, inputs: Inputs, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse: in float64, rounded here to the dtypes that the inputs ask for."""
    dtype = inputs.q.dtype
    rows = inputs.dout, inputs.q, inputs.k, inputs.v, out.to(dtype), lse.to(statistics_dtype(dtype))
    return backend.backward(*rows, inputs.segments, Rule(case.causal, case.window, scale))


def _whole_rows(
    backend: Backend, case: Case, device: torch.device, dtype: torch.dtype, out: Tensor, lse: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The outputs and log-sum-exps of whole rows for which the back end gives gradients."""
    if backend.refusal(case.request(device, dtype, rings=False, gradient=True)) is None:
        yield out, lse
    if backend.refusal(case.request(device, dtype, rings=True, gradient=True)) is None:
        yield out / 2, lse + math.log(2.0)  # other keys of the same weight, with values 0


def _blank(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Which query rows see nothing, and which key rows are seen by nothing: bool [Tq], [Tk]."""
    rows, keys = (torch.ones(len(x), dtype=torch.bool, device=x.device) for x in (inputs.q, inputs.k))
    for queries, seen in reference.row_ranges(inputs.segments):
        lengths = queries.stop - queries.start, seen.stop - seen.start
        visible = reference.visible(*lengths, Rule(case.causal, case.window, 1.0), rows.device)
        rows[queries], keys[seen] = ~visible.any(dim=1), ~visible.any(dim=0)
    return rows, keys


def difference(got: Tensor, true: Tensor, dtype: torch.dtype, blank: Tensor | None = None) -> float:
    """blank: rows that have to be 0, exactly. What is not finite in `true` has to be the same in `got`."""
    if got.shape != true.shape or got.dtype != dtype:
        return math.inf
    finite = true.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite].double(), true[~finite]):
        return math.inf
    if blank is not None and bool(got[blank].ne(0).any()):
        return math.inf
    got, true = got[finite].double(), true[finite]
    largest = max(true.abs().max().item(), NEGLIGIBLE) if len(true) else NEGLIGIBLE
    return (got - true).abs().max().item() / largest if len(true) else 0.0


def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def _rows(rows: int, heads: int, case: Case, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, heads, case.head_dim, generator=generator, dtype=torch.float64)


def _widened(x: Tensor) -> Tensor:
    """The same values, in rows with something else behind them."""
    return torch.cat((x, torch.full_like(x, torch.nan)), dim=1)[:, : x.shape[1]]
