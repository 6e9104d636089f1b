"""One list of lengths through every packer: documents per CPU-second, bins, and what follows from them.

seqmesh gives bin ids; `seqmesh, CSR` gives the documents of each bin as well, which is what peers give. The roof is a
compiled pass that reads each length and writes a bin id, the floor is next fit in a Python loop. The time is CPU
seconds of this process, without Python's garbage collector, as in `timeit`, and without giving back the memory of an
answer. Both would cost peers more than us, as they answer with a list for each bin. Every packer's first answer is
checked.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from seqmesh.benchmarks.harness import (
    Ratio,
    Results,
    Row,
    Spread,
    absent,
    count_ratio,
    installed_version,
    measure,
    ratio,
    row,
)
from seqmesh.benchmarks.peers_packing import ADAPTERS, SLOW, Adapter, Packed, Prepared, check
from seqmesh.packer.bins import Bins, pack
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array

SEQMESH, CSR, ROOF, FLOOR = "seqmesh", "seqmesh, CSR", "roof", "next fit in Python"
SPEED = "documents/CPU-s"
FEWEST_DOCUMENTS = 200_000  # in one measurement: small cases are called several times


def packing(case: str, lengths: Int64Array, capacity: int, peers: tuple[str, ...], repeats: int) -> Results:
    """All candidates, of the peers those that are installed."""
    present = [peer for peer in peers if installed_version(peer) is not None]
    spreads, counts = measured((SEQMESH, CSR, *present, FLOOR, ROOF), lengths, capacity, repeats)
    bound = {"documents": len(lengths), "bound": pack(lengths, capacity).bound}
    rows = {
        name: row(case, name, spread.rate(len(lengths)), SPEED, **counts.get(name, {}), **bound)
        for name, spread in spreads.items()
    }
    rows |= {peer: absent(case, peer, SPEED) for peer in peers if peer not in present}
    return Results(rows=tuple(rows.values()), ratios=packing_ratios(rows, peers))


def packing_ratios(rows: dict[str, Row], peers: tuple[str, ...]) -> tuple[Ratio, ...]:
    """Figures of one packing case. The best peer is the fastest of those that need no more bins; where none is
    installed, or none is as tight, the figure has no value."""
    ours, best = rows[SEQMESH], best_peer(rows, peers)
    return (
        ratio("pack_vs_roof", ours, rows[ROOF]),
        ratio("pack_bfd_vs_best_peer", ours, best),
        ratio("pack_csr_vs_best_peer", rows[CSR], best),
        *(ratio(f"pack_vs_{peer}", ours, rows[peer]) for peer in peers if peer in SLOW),
        ratio("pack_vs_next_fit", ours, rows[FLOOR]),
        count_ratio("bins_vs_bound", ours, "bins", "bound"),
    )


def best_peer(rows: dict[str, Row], peers: tuple[str, ...]) -> Row:
    ours = rows[SEQMESH]
    right = [rows[peer] for peer in peers if rows[peer].value and not rows[peer].counts["overfull"]]
    tight = [each for each in right if each.counts["bins"] <= ours.counts["bins"] and not each.counts["missing"]]
    return max(tight, key=lambda each: each.value or 0.0, default=absent(ours.case, "best peer", SPEED))


def calling(lengths: Int64Array, capacity: int, case: str, repeats: int) -> Results:
    """Milliseconds of one call, where it is short."""
    spreads, counts = measured((SEQMESH, CSR), lengths, capacity, repeats)
    return Results(
        rows=tuple(
            row(case, name, spread.scaled(1e3), "CPU-ms", **counts[name], documents=len(lengths))
            for name, spread in spreads.items()
        )
    )


def measured(
    names: tuple[str, ...], lengths: Int64Array, capacity: int, repeats: int
) -> tuple[dict[str, Spread], dict[str, dict[str, int]]]:
    """Seconds of a call, and what the check counted, by candidate."""
    counts: dict[str, dict[str, int]] = {}
    candidates: dict[str, Callable[[], float]] = {}
    for name in names:
        loops = 1 if name in SLOW else max(1, FEWEST_DOCUMENTS // len(lengths))
        if name == ROOF:
            candidates[name] = _timing(roof_pass(lengths), loops, _ignore)
        else:
            prepared = adapter(name)(lengths, capacity)
            candidates[name] = _timing(prepared.call, loops, _noting(prepared, name, lengths, capacity, counts))
    with no_garbage_collection():
        return measure(candidates, repeats), counts


def adapter(name: str) -> Adapter:
    """How to prepare a candidate: one of ours, or a peer."""
    return OURS[name] if name in OURS else ADAPTERS[name]


def seqmesh_bins(lengths: Int64Array, capacity: int) -> Prepared:
    """Bin ids alone."""
    return Prepared(lambda: pack(lengths, capacity), _of_bins)


def seqmesh_csr(lengths: Int64Array, capacity: int) -> Prepared:
    """Bin ids, and the documents of each bin."""

    def call() -> Bins:
        bins = pack(lengths, capacity)
        assert len(bins.order) == len(lengths)  # made when it is asked for
        return bins

    return Prepared(call, _of_bins)


def next_fit_in_python(lengths: Int64Array, capacity: int) -> Prepared:
    """What one writes in five lines: documents in order, a new bin when the next one does not fit."""
    sizes: list[int] = lengths.tolist()  # converted beforehand: a loop over a numpy array is slower still

    def call() -> list[int]:
        bin_of = []
        current, room = -1, 0
        for size in sizes:
            if size > room:
                current, room = current + 1, capacity
            room -= size
            bin_of.append(current)
        return bin_of

    return Prepared(call, lambda bin_of: (lengths, np.bincount(bin_of).astype(np.int64)))


OURS: dict[str, Adapter] = {SEQMESH: seqmesh_bins, CSR: seqmesh_csr, FLOOR: next_fit_in_python}


def roof_pass(lengths: Int64Array) -> Callable[[], None]:
    """As fast as any packer could be: the lengths read once, a bin id written for each."""
    bin_of = np.empty_like(lengths)
    return lambda: _read_and_write(lengths, bin_of)


@jit
def _read_and_write(lengths: Int64Array, bin_of: Int64Array) -> None:
    for i in range(len(lengths)):
        bin_of[i] = lengths[i] >> 8


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Lists of millions of numbers, as peers take and give them, are not searched for garbage while time is taken."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def _timing(call: Callable[[], object], loops: int, note: Callable[[object], None]) -> Callable[[], float]:
    """A candidate that takes its own time, of one of `loops` calls, and hands on the last answer."""

    def run() -> float:
        seconds, answer = 0.0, None
        for _ in range(loops):
            answer = None  # given back before the next one, while no time is taken
            begin = time.process_time()
            answer = call()
            seconds += time.process_time() - begin
        note(answer)
        return seconds / loops

    return run


def _noting(
    prepared: Prepared, name: str, lengths: Int64Array, capacity: int, counts: dict[str, dict[str, int]]
) -> Callable[[object], None]:
    """Check the first answer."""

    def note(answer: object) -> None:
        if name not in counts:
            counts[name] = check(prepared.packed(answer), lengths, capacity)

    return note


def _of_bins(bins: Bins) -> Packed:
    return bins.lengths[bins.order], np.diff(bins.offsets)


def _ignore(_answer: object) -> None:
    """The roof packs nothing."""
