"""`seqmesh bench attention`: attention over packed documents, beside what one would write without it, and its roof.

One thread, 8 heads of width 64, forward alone and with backward, as GFLOP/s of the arithmetic that the attended pairs
need (`benchmarks.attention_cases`); the machine's roof is a large product of two matrices of the same dtype, which
takes its turn among the candidates. `seqmesh.benchmarks.baselines.attention` has those. Then a sliding window beside
full attention of the same document; how far results are from those in float64 (`attention_errors`); what ranks
exchange, in time and in bytes (`attention_ranks`); and what plans of real documents would send (`rings`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqmesh.benchmarks.attention_cases import (
    Attend,
    Pack,
    forward,
    forward_backward,
    ours,
    packs,
    random_rows,
)
from seqmesh.benchmarks.attention_errors import errors, relative_error
from seqmesh.benchmarks.attention_ranks import exchanges
from seqmesh.benchmarks.baselines import attention as baselines
from seqmesh.benchmarks.harness import Results, Row, Spread, absent, chosen_peers, measure, ratio, row
from seqmesh.benchmarks.loss import compiler_scratch, one_thread
from seqmesh.benchmarks.rings import real_lists

PEERS: tuple[str, ...] = ()
SEQMESH, LOOP, DENSE, FLEX, ROOF, FULL = "seqmesh", "loop", "dense", "flex", "roof", "full"
PASSES = {"forward": forward, "forward+backward": forward_backward}
UNIT = "GFLOP/s"
GIGA = 1e9
PLANNED_RANKS = 8
ALIKE = 0.02  # of the largest value: what bfloat16 may differ by
SQUARE = 1_024  # of the roof's matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """repeats: of every candidate. window, windowed: keys that a row sees, of a document of so many tokens.
    masked: the most tokens of a pack behind a mask, whose scores grow with the square: 32K take a minute and a half.
    flex: how many packs FlexAttention is compiled for, which takes 5 to 20 seconds each. compared: tokens of the pack
    whose errors are counted. steps: planned for each list of real lengths."""

    repeats: int
    window: int
    windowed: int
    masked: int
    flex: int
    compared: int
    steps: int


QUICK = Size(repeats=3, window=128, windowed=2_048, masked=1_024, flex=1, compared=1_024, steps=8)
WHOLE = Size(repeats=3, window=512, windowed=8_192, masked=8_192, flex=8, compared=4_096, steps=64)


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Measure all parts."""
    chosen_peers(PEERS, against)
    size = QUICK if quick else WHOLE
    results = Results()
    with one_thread(), compiler_scratch():
        for number, pack in enumerate(packs(quick=quick)):
            results += measure_pack(pack, size, flex=number < size.flex)
        results += measure_window(size)
        results += errors(size.compared)
    return results + exchanges(quick=quick) + real_lists(PLANNED_RANKS, size.steps)


def measure_pack(pack: Pack, size: Size, *, flex: bool) -> Results:
    """Both passes of all candidates over a pack."""
    rows = random_rows(pack.tokens, pack.dtype)
    attends = candidates_of(pack, rows, masked=pack.tokens <= size.masked, flex=flex)
    results = Results()
    for name, do in PASSES.items():
        if do is forward_backward and callable(attends[FLEX]):
            attends[FLEX] = "no backward pass on the CPU"
        turns = {each: turn(do, attend, rows) for each, attend in attends.items() if callable(attend)}
        # In turns with masks, whose scores take much memory, the loop's time wandered by a third from round to round.
        apart = {each: turns.pop(each) for each in (DENSE,) if each in turns}
        seconds = measure({**turns, ROOF: _roof(pack.dtype)}, size.repeats) | measure(apart, size.repeats)
        results += compare(f"{pack.case}, {name}", seconds, pack.flops(backward=do is forward_backward), attends)
    return results


def candidates_of(pack: Pack, rows: Sequence[Tensor], *, masked: bool, flex: bool) -> dict[str, Attend | str]:
    """By name; one that is left out has the reason in its place."""
    return {
        SEQMESH: ours(pack.lengths),
        LOOP: baselines.loop(pack.lengths),
        DENSE: baselines.dense(pack.lengths) if masked else "a mask of so many tokens takes too long",
        FLEX: compiled_flex(pack, rows) if flex else "not compiled for this pack",
    }


def compiled_flex(pack: Pack, rows: Sequence[Tensor]) -> Attend | str:
    """FlexAttention, compiled; or why there is none."""
    attend = baselines.flex(pack.lengths)
    try:
        out = forward(attend, rows)
    except RuntimeError as error:  # as all that torch's compiler raises are
        return f"does not compile here: {str(error).strip().splitlines()[0]}"
    right = forward(baselines.loop(pack.lengths), rows)
    return attend if relative_error(out, right, right) < ALIKE else "compiles to something else"


def turn(
    do: Callable[[Attend, Sequence[Tensor]], object], attend: Attend, rows: Sequence[Tensor]
) -> Callable[[], None]:
    """A pass as a candidate for `measure`."""

    def run_once() -> None:
        do(attend, rows)

    return run_once


def compare(case: str, seconds: dict[str, Spread], flops: float, attends: dict[str, Attend | str]) -> Results:
    """All candidates as speeds, ours beside each; and those that are left out, with the reason."""
    work = dict.fromkeys(seconds, flops) | {ROOF: 2.0 * SQUARE**3}
    found = {each: _speed(case, each, spread, work[each]) for each, spread in seconds.items()}
    left_out = {each: why for each, why in attends.items() if isinstance(why, str)}
    found |= {each: replace(absent(case, each, UNIT), note=why) for each, why in left_out.items()}
    mine = found[SEQMESH]
    ratios = [ratio(f"attention_vs_{each}", mine, found[each]) for each in (LOOP, DENSE, FLEX)]
    return Results(rows=tuple(found.values()), ratios=(*ratios, ratio("attention_of_roof", mine, found[ROOF])))


def _roof(dtype: torch.dtype) -> Callable[[], None]:
    a, b = (torch.randn(SQUARE, SQUARE).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.mm(a, b)

    return multiply


def _speed(case: str, candidate: str, seconds: Spread, flops: float) -> Row:
    return row(case, candidate, seconds.rate(flops / GIGA), UNIT, ms=seconds.median * 1e3)


def measure_window(size: Size) -> Results:
    """A window beside full attention of the same document, ours and torch's, and beside torch's with a mask."""
    lengths, rows = (size.windowed,), random_rows(size.windowed, torch.float32)
    attends = {
        SEQMESH: ours(lengths, size.window),
        FULL: ours(lengths),
        LOOP: baselines.loop(lengths),
        DENSE: baselines.dense(lengths, size.window),
    }
    results = Results()
    for name, do in PASSES.items():
        case = f"window {size.window} of {size.windowed}, float32, {name}"
        seconds = measure({each: turn(do, attend, rows) for each, attend in attends.items()}, size.repeats)
        found = {each: row(case, each, spread.scaled(1e3), "ms") for each, spread in seconds.items()}
        ratios = [ratio(f"window_vs_{each}", found[each], found[SEQMESH]) for each in (FULL, LOOP, DENSE)]
        results += Results(rows=tuple(found.values()), ratios=tuple(ratios))
    return results
