"""Does attention work on this machine, and how fast? `python -m seqmesh.tools.gpu_check [--json FILE] [--quick]`

Runs every back end that the machine can run, on the CPU and on its first GPU, over the cases of
`seqmesh.tools.kernel_cases`, and compares with the formula in float64; then times those that were right on the GPU.
Prints two tables and what the machine is, and ends with exit code 1 if anything was wrong. A back end that says that it
cannot do a case is not wrong: its reason is printed. With two GPUs or more `seqmesh.tools.ring_check` runs over them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from seqmesh.kernels.backends import table
from seqmesh.kernels.backends.base import Backend, Rule
from seqmesh.tools import ring_check
from seqmesh.tools.kernel_cases import PARTS, Case, cases, compare, large_cases, make_inputs, worst
from seqmesh.tools.output import check_folders, print_whole, print_written

BACKENDS = {name: backend for name, backend in table.BACKENDS.items() if name not in table.BY_NAME_ONLY}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DISTRIBUTIONS = ("seqmesh", "torch", "triton", "flash-attn", "flash_attn_3", "flash-attn-4")
NO_GPU = "There is no CUDA device here: not run on a GPU. What runs on the CPU was checked."
QUICK = 5  # every how manieth case
PACKS = {
    "one document": (16384,),
    "long tail": (8192, 4096, 2048, 1024, 512, 256, 128, 128),
    "short documents": (128,) * 128,
}
REPEATS, WARM_UP = 10, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One back end on one device and dtype. right: cases that were as they should be. refused: reasons with the number
    of cases. errors: the worst of each part, see `kernel_cases.compare`. failures: a sentence for each case."""

    backend: str
    device: str
    dtype: str
    right: int
    refused: dict[str, int]
    errors: dict[str, float]
    failures: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians, in seconds; both is forward and backward, or None where there are no gradients. forward_flops: two for
    each multiplication and addition on a pair of a row and a key that it sees; backward has 2.5 times as many."""

    backend: str
    device: str
    dtype: str
    pack: str
    forward: float
    both: float | None
    forward_flops: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m seqmesh.tools.gpu_check", description=(__doc__ or "").split("`")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file, too")
    parser.add_argument("--quick", action="store_true", help="fewer cases, and no times")
    options = parser.parse_args(arguments)
    try:
        check_folders(options.json)
    except FileNotFoundError as error:
        parser.error(str(error))
    return run(json_path=options.json, quick=options.quick)


def run(*, json_path: Path | None = None, quick: bool = False, console: Console | None = None) -> int:
    """The exit code."""
    console = console or Console()
    verdicts = [verdict for device in devices() for verdict in judge(BACKENDS, device, tried_on(device, quick=quick))]
    timed = [verdict for verdict in verdicts if verdict.device == "cuda" and not quick]
    timings = [timing for verdict in timed for timing in clock(BACKENDS, verdict)]
    about, rings = machine(), None if quick else check_rings()
    report(console, about, verdicts, timings, rings)
    if json_path is not None:
        tables = {"verdicts": [*map(asdict, verdicts)], "timings": [*map(asdict, timings)]}
        json_path.write_text(json.dumps({"machine": about, **tables, "rings": rings}, indent=2) + "\n")
        print_written(console, json_path)
    return 1 if rings or any(verdict.failures for verdict in verdicts) else 0


def check_rings() -> str | None:
    """What is wrong between the GPUs of this machine; an empty string where all is well, None with fewer than two."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ring_check.run_apart(count) if count > 1 else None


def devices() -> list[torch.device]:
    return [torch.device("cpu")] + ([torch.device("cuda", 0)] if torch.cuda.is_available() else [])


def tried_on(device: torch.device, *, quick: bool = False) -> list[Case]:
    every = cases() + (large_cases() if device.type == "cuda" else [])
    return every[::QUICK] if quick else every


def machine() -> dict[str, Any]:
    """What ran. gpu is None where there is none."""
    versions = {name: found for name in DISTRIBUTIONS if (found := _version(name)) is not None}
    about: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform(), "packages": versions}
    if not torch.cuda.is_available():
        return about | {"gpu": None}
    capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
    gpu = {"name": torch.cuda.get_device_name(0), "capability": capability, "cuda": torch.version.cuda}
    return about | {"gpu": gpu | {"count": torch.cuda.device_count()}}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# Checking.


def judge(backends: Mapping[str, Backend], device: torch.device, tried: Sequence[Case]) -> Iterator[Verdict]:
    """Of every back end on the device, in every dtype."""
    return (check(name, backend, device, dtype, tried) for name, backend in backends.items() for dtype in DTYPES)


def check(name: str, backend: Backend, device: torch.device, dtype: torch.dtype, tried: Sequence[Case]) -> Verdict:
    refused, failures, errors = Counter[str](), list[str](), dict[str, float]()
    for case in tried:
        reason = backend.refusal(case.request(device, dtype, rings=False, gradient=False))
        if reason is not None:
            refused[reason] += 1
            continue
        found, failure = _outcome(backend, case, device, dtype)
        errors |= {part: max(error, errors.get(part, 0.0)) for part, error in found.items()}
        failures += [failure] if failure else []
    return Verdict(
        backend=name,
        device=device.type,
        dtype=_short(dtype),
        right=len(tried) - len(failures) - refused.total(),
        refused=dict(refused),
        errors=errors,
        failures=failures,
    )


def _outcome(
    backend: Backend, case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, float], str | None]:
    """(errors, what is wrong). Whatever a library raises is a finding, and the other cases are still to be seen."""
    where = f"{case.name}, {'causal' if case.causal else 'full'}, window {case.window}"
    try:
        errors = compare(backend, case, device, dtype)
    except Exception as error:
        return {}, f"{where}: {type(error).__name__}: {error}"
    wrong = worst(errors, dtype)
    return errors, None if wrong is None else f"{where}: {wrong[0]} is off by {wrong[1]:.1e}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Timing.


def clock(backends: Mapping[str, Backend], verdict: Verdict) -> Iterator[Timing]:
    """Packs of one size, for a back end that was right in all that it did."""
    if verdict.failures or not verdict.right:
        return
    backend, device, dtype = backends[verdict.backend], torch.device(verdict.device), getattr(torch, verdict.dtype)
    for case in packs():
        forward, backward = _calls(backend, case, device, dtype)
        seconds = _median(forward, device)
        yield Timing(
            backend=verdict.backend,
            device=verdict.device,
            dtype=verdict.dtype,
            pack=case.name,
            forward=seconds,
            both=None if backward is None else seconds + _median(backward, device),
            forward_flops=flops(case),
        )


def packs() -> list[Case]:
    """Causal, of 16,384 rows: one of each kind."""
    return [
        Case(name=name, query_lengths=lengths, key_lengths=lengths, heads=32, kv_heads=8, head_dim=128)
        for name, lengths in PACKS.items()
    ]


def flops(case: Case) -> int:
    """Of the forward pass of a causal pack without a window."""
    pairs = sum(length * (length + 1) // 2 for length in case.query_lengths)
    return 4 * pairs * case.heads * case.head_dim


def _calls(
    backend: Backend, case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    x = make_inputs(case, device, dtype)
    rule = Rule(causal=True, window=None, scale=1 / math.sqrt(case.head_dim))
    q, k, v = x.q, x.k, x.v

    def forward() -> Any:
        return backend.forward(q, k, v, x.segments, rule)

    if backend.refusal(case.request(device, dtype, rings=False, gradient=True)) is not None:
        return forward, None
    out, lse = forward()

    def backward() -> Any:
        return backend.backward(x.dout, q, k, v, out, lse, x.segments, rule)

    return forward, backward


def _median(call: Callable[[], Any], device: torch.device) -> float:
    def seconds() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return statistics.median([seconds() for _ in range(WARM_UP + REPEATS)][WARM_UP:])


# Printing.


def report(
    console: Console,
    about: Mapping[str, Any],
    verdicts: Sequence[Verdict],
    timings: Sequence[Timing],
    rings: str | None,
) -> None:
    print_whole(console, _verdict_table(verdicts))
    for verdict in verdicts:
        for failure in verdict.failures:
            console.print(
                f"{verdict.backend}, {verdict.device}, {verdict.dtype}: {failure}", markup=False, soft_wrap=True
            )
    for (backend, device, reason), dtypes in _reasons(verdicts).items():
        console.print(f"{backend}, {device}, {', '.join(dtypes)}: {reason}", markup=False, soft_wrap=True)
    if timings:
        print_whole(console, _timing_table(timings))
    if rings is not None:
        console.print(f"rings: {rings or 'right'}", markup=False, highlight=False, soft_wrap=True)
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    console.print(f"Python {about['python']}, {packages}", markup=False, highlight=False, soft_wrap=True)
    gpu = about["gpu"]
    text = NO_GPU if gpu is None else f"{gpu['name']}, compute capability {gpu['capability']}, CUDA {gpu['cuda']}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _reasons(verdicts: Sequence[Verdict]) -> dict[tuple[str, str, str], list[str]]:
    """The dtypes of each reason."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for verdict in verdicts:
        for reason in verdict.refused:
            reasons.setdefault((verdict.backend, verdict.device, reason), []).append(verdict.dtype)
    return reasons


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="Against the formula in float64: largest difference over largest value, or over 1")
    for column in ("back end", "device", "dtype", "right", "wrong", "refused", *PARTS):
        table.add_column(column)
    for verdict in verdicts:
        if not verdict.right and not verdict.failures:
            continue  # its reasons are printed below
        counts = verdict.right, len(verdict.failures), sum(verdict.refused.values())
        errors = (f"{verdict.errors[part]:.1e}" if part in verdict.errors else "" for part in PARTS)
        table.add_row(verdict.backend, verdict.device, verdict.dtype, *map(str, counts), *errors)
    return table


def _timing_table(timings: Sequence[Timing]) -> Table:
    table = Table(title="Causal packs: medians")
    for column in ("back end", "device", "dtype", "pack", "forward, ms", "TFLOP/s", "with backward, ms", "TFLOP/s"):
        table.add_column(column)
    for each in timings:
        rates = (each.forward, each.forward_flops), (each.both, each.forward_flops * 3.5)
        texts = [text for seconds, work in rates for text in _time(seconds, work)]
        table.add_row(each.backend, each.device, each.dtype, each.pack, *texts)
    return table


def _time(seconds: float | None, work: float) -> tuple[str, str]:
    return ("", "") if seconds is None else (f"{seconds * 1e3:.3f}", f"{work / seconds / 1e12:.2f}")


if __name__ == "__main__":
    sys.exit(main())
