"""`seqmesh bench loss`: the loss of a linear layer beside holding all logits, and compiled kernels beside eager ones.

CPU seconds of one thread, forward and backward. The peers are torch's: the plain formula, and its own chunked function.

    loss_memory     peak memory of linear layer and loss over that of the plain formula, each in a fresh process
    loss_time       CPU time, the same
    fused_rms_norm, fused_swiglu, fused_rotary      CPU time of the eager function over its compiled twin's
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from seqmesh.benchmarks.harness import Results, Row, Spread, absent, chosen_peers, measure, ratio, row
from seqmesh.benchmarks.linear_losses import (
    CANDIDATES,
    LOGITS,
    SEQMESH,
    Case,
    available,
    extra_bytes,
    step,
    truth,
)
from seqmesh.benchmarks.processes import measurable
from seqmesh.kernels.activation import swiglu
from seqmesh.kernels.fuse import compiled
from seqmesh.kernels.norm import rms_norm
from seqmesh.kernels.rotary import apply_rotary, rotary_tables

PEERS: tuple[str, ...] = ()
DTYPES = ("float32", "bfloat16")
SMALL = tuple(Case(2_048, 256, 8_192, dtype) for dtype in DTYPES)
LARGE = tuple(Case(*shape, dtype) for shape in ((8_192, 512, 32_768), (2_048, 512, 128_256)) for dtype in DTYPES)
CACHE = "TORCHINDUCTOR_CACHE_DIR"
Function = Callable[..., Tensor]


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Every case of the loss, then the compiled kernels; torch is set to one thread meanwhile."""
    chosen_peers(PEERS, against)
    results = Results()
    with one_thread():
        for case in SMALL:
            results += compare_losses(case, tuple(CANDIDATES), repeats=2)
        for case in () if quick else LARGE:  # minutes of torch's own
            results += compare_losses(case, (SEQMESH, LOGITS), repeats=2)
        with compiler_scratch():
            results += compare_fused(2_048 if quick else 4_096, 1_024, repeats=5 if quick else 9)
    return results


def compare_losses(case: Case, names: Sequence[str], *, repeats: int) -> Results:
    """Time, memory and exactness of the candidates."""
    inputs = case.inputs()
    exact = truth(inputs)
    present = [name for name in names if available(name)]
    spreads = measure({name: partial(_timed_step, name, inputs) for name in present}, repeats)
    times = {name: _loss_row(case, name, spreads[name], inputs, exact) for name in present}
    memory = {name: _memory_row(case, name) for name in present}
    missing = [absent(case.name, name, "s") for name in names if name not in present]
    rows = (*times.values(), *memory.values(), *missing)
    figures = (ratio("loss_time", times[SEQMESH], times[LOGITS]), ratio("loss_memory", memory[SEQMESH], memory[LOGITS]))
    return Results(rows=rows, ratios=figures)


def _timed_step(name: str, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    step(CANDIDATES[name], inputs)


def _loss_row(case: Case, name: str, spread: Spread, inputs: tuple[Tensor, Tensor, Tensor], exact: float) -> Row:
    """off_ppm: how far the loss is from float64's, in millionths of it."""
    with torch.no_grad():
        off = abs(float(CANDIDATES[name](*inputs)) / exact - 1) * 1e6
    return row(case.name, name, spread, "s", off_ppm=round(off, 3))


def _memory_row(case: Case, name: str) -> Row:
    if not measurable():
        return absent(f"memory, {case.name}", name, "MB")
    megabytes = extra_bytes(name, case) / 1e6
    return row(f"memory, {case.name}", name, Spread.of([megabytes]), "MB")


def compare_fused(rows: int, width: int, *, repeats: int) -> Results:
    """Eager functions beside their twins, compiled in the warm-up round."""
    results = Results()
    for name, function, inputs, constants in fused_cases(rows, width):
        dout = torch.randn_like(function(*inputs, *constants))
        both = {"eager": function, "compiled": compiled(function)}
        steps = {key: partial(_gradients, each, inputs, constants, dout) for key, each in both.items()}
        _check_equal(name, steps["eager"](), steps["compiled"]())
        spreads = measure({key: partial(_without_result, each) for key, each in steps.items()}, repeats)
        case = f"{name}, {rows:,} rows, width {width:,}, float32"
        eager, fused = (row(case, key, spread.scaled(1e3), "ms") for key, spread in spreads.items())
        results += Results(rows=(eager, fused), ratios=(ratio(f"fused_{name}", eager, fused),))
    return results


def fused_cases(rows: int, width: int) -> Iterator[tuple[str, Function, tuple[Tensor, ...], tuple[Any, ...]]]:
    """Name, function, inputs that want gradients, the other arguments."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    ffn = 8 * width // 3 // 64 * 64
    yield "rms_norm", rms_norm, (leaf(rows, width), leaf(width)), (1e-5,)
    yield "swiglu", swiglu, (leaf(rows, ffn), leaf(rows, ffn)), ()
    tables = rotary_tables(torch.arange(rows), 64, 10_000.0, torch.float32)
    yield "rotary", apply_rotary, (leaf(rows, width // 64, 64),), tables


def _gradients(
    function: Function, inputs: Sequence[Tensor], constants: Sequence[Any], dout: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*inputs, *constants), inputs, dout)


def _without_result(function: Callable[[], Any]) -> None:
    function()


def _check_equal(name: str, eager: Sequence[Tensor], fused: Sequence[Tensor]) -> None:
    """Raises AssertionError where the two compute different gradients."""
    for a, b in zip(eager, fused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=f"{name}: compiled gradients differ from eager ones")


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def compiler_scratch() -> Iterator[None]:
    """What the compiler writes is removed, it starts no processes, and takes the CPU's word for its vector units."""
    before = os.environ.get(CACHE)
    quick = {"compile_threads": 1, "cpp.vec_isa_ok": True}
    with TemporaryDirectory() as folder, torch._inductor.config.patch(quick):
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            torch.compiler.reset()
            os.environ.pop(CACHE)
            if before is not None:
                os.environ[CACHE] = before
