"""`seqmesh bench packer`: packing, balancing and planning, one thread.

pack: documents per CPU-second of `pack(best_fit_decreasing)`, which gives bin ids and the documents of each bin, beside
peers that do the same, a roof (a compiled pass that reads each length and writes a bin id) and a floor (next fit in a
Python loop). Every candidate's number of bins is counted beside bound = ceil(tokens / capacity), under which nobody
gets. partition: items per CPU-second. plan: CPU milliseconds of `plan_step`, with the balance that it reached.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np

from seqmesh.benchmarks.harness import (
    Ratio,
    Results,
    Row,
    Spread,
    absent,
    chosen_peers,
    count_ratio,
    installed_version,
    measure,
    ratio,
    row,
)
from seqmesh.benchmarks.lengths import python_documents, python_lengths, web_lengths
from seqmesh.packer.balance import partition
from seqmesh.packer.bins import pack
from seqmesh.packer.cost import ModelShape
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import Mesh, plan_step

PEERS = ("lightbinpack", "seqpacker")
CAPACITY = 32_768
DOCUMENTS = 1_000_000
SEQMESH, ROOF, FLOOR = "seqmesh", "roof", "next fit in Python"
SPEED = "documents/CPU-s"

PARTITIONS = ((8_192, 64), (100_000, 1_024))  # items, parts
PLANS = ((1 << 20, 8), (1 << 20, 64), (1 << 23, 8), (1 << 23, 64))  # tokens in the step, ranks
MODEL = ModelShape(
    layers=32, width=4_096, heads=32, kv_heads=8, head_width=128, ffn_width=14_336, vocab_size=128_256
)  # what plans are balanced by: about 8 thousand million parameters

Packer = Callable[[], int]  # packs and returns the number of bins


def run(*, quick: bool, against: tuple[str, ...] = (), documents: int = DOCUMENTS) -> Results:
    """All cases. `documents`: of each packing case, and most items of a partition."""
    peers = chosen_peers(PEERS, against)
    repeats = 5 if quick else 15
    cases = {
        "pack web": web_lengths(documents, CAPACITY),
        "pack python": python_lengths(documents, CAPACITY),
    }
    results = Results()
    for case, lengths in cases.items():
        results += packing(case, lengths, CAPACITY, peers, repeats)
    for items, parts in PARTITIONS:
        results += balancing(min(items, documents), parts, repeats)
    for tokens, ranks in PLANS:
        results += planning(tokens, ranks, repeats)
    return results


def packing(case: str, lengths: Int64Array, capacity: int, peers: tuple[str, ...], repeats: int) -> Results:
    """One list of lengths through every packer."""
    present = [peer for peer in peers if installed_version(peer) is not None]
    packers: dict[str, Packer] = {SEQMESH: lambda: pack(lengths, capacity).count}
    packers |= {peer: PEER_PACKERS[peer](lengths, capacity) for peer in present}
    packers |= {FLOOR: next_fit_packer(lengths, capacity)}
    bins: dict[str, int] = {}
    candidates = {name: _counting(packer, name, bins) for name, packer in packers.items()}
    spreads = measure({**candidates, ROOF: roof_pass(lengths)}, repeats)
    bound = -(-int(lengths.sum()) // capacity)
    rows = {name: _speed_row(case, name, spreads[name], lengths, bins=bins[name], bound=bound) for name in packers}
    rows |= {ROOF: _speed_row(case, ROOF, spreads[ROOF], lengths)}
    rows |= {peer: absent(case, peer, SPEED) for peer in peers if peer not in present}
    return Results(rows=tuple(rows.values()), ratios=packing_ratios(rows, peers))


def packing_ratios(rows: dict[str, Row], peers: tuple[str, ...]) -> tuple[Ratio, ...]:
    """Figures of one packing case. The best peer is the fastest of those that need no more bins; where none is
    installed, or none is as tight, the figure has no value."""
    ours = rows[SEQMESH]
    tight = [rows[peer] for peer in peers if rows[peer].value and rows[peer].counts["bins"] <= ours.counts["bins"]]
    best = max(tight, key=lambda each: each.value or 0.0, default=absent(ours.case, "best peer", SPEED))
    return (
        ratio("pack_vs_roof", ours, rows[ROOF]),
        ratio("pack_bfd_vs_best_peer", ours, best),
        ratio("pack_vs_next_fit", ours, rows[FLOOR]),
        count_ratio("bins_vs_bound", ours, "bins", "bound"),
    )


def balancing(items: int, parts: int, repeats: int) -> Results:
    """Documents of web-like lengths spread over parts by their cost."""
    costs = MODEL.cost_model().of(web_lengths(items, CAPACITY))
    spread = measure({SEQMESH: lambda: _discard(partition(costs, parts))}, repeats)[SEQMESH]
    found = partition(costs, parts)
    case = f"partition {items} in {parts}"
    over = float(found.loads.max()) / found.lower_bound - 1
    return Results(
        rows=(row(case, SEQMESH, spread.rate(items), "items/CPU-s", imbalance=found.imbalance, over_bound=over),)
    )


def planning(tokens: int, ranks: int, repeats: int) -> Results:
    """One step of real lengths planned for `ranks`."""
    lengths, cost = python_documents(tokens, CAPACITY), MODEL.cost_model()
    mesh = Mesh(ranks=ranks, capacity=CAPACITY)
    spread = measure({SEQMESH: lambda: _discard(plan_step(lengths, mesh, cost))}, repeats)[SEQMESH]
    plan = plan_step(lengths, mesh, cost)
    case = f"plan {tokens >> 20}M tokens on {ranks}"
    counts = {"documents": len(lengths), "imbalance": plan.imbalance, "gap": plan.gap}
    return Results(rows=(row(case, SEQMESH, spread.scaled(1e3), "CPU-ms", **counts),))


def roof_pass(lengths: Int64Array) -> Callable[[], None]:
    """As fast as any packer could be: the lengths read once, a bin id written for each."""
    bin_of = np.empty_like(lengths)
    return lambda: _read_and_write(lengths, bin_of)


@jit
def _read_and_write(lengths: Int64Array, bin_of: Int64Array) -> None:
    for i in range(len(lengths)):
        bin_of[i] = lengths[i] >> 8


def next_fit_packer(lengths: Int64Array, capacity: int) -> Packer:
    """What one writes in five lines: documents in order, a new bin when the next one does not fit."""
    sizes: list[int] = lengths.tolist()  # converted beforehand: a loop over a numpy array is slower still

    def run() -> int:
        bin_of = []
        current, room = -1, 0
        for size in sizes:
            if size > room:
                current, room = current + 1, capacity
            room -= size
            bin_of.append(current)
        return current + 1

    return run


def lightbinpack_packer(lengths: Int64Array, capacity: int) -> Packer:
    """lightbinpack's best-fit decreasing with a counting sort. It takes a list; the conversion is not counted."""
    best_fit = import_module("lightbinpack").obfd
    sizes = lengths.tolist()
    return lambda: len(best_fit(sizes, capacity))


def seqpacker_packer(lengths: Int64Array, capacity: int) -> Packer:
    """seqpacker's best-fit decreasing through its fastest interface: flat arrays in and out."""
    packer = import_module("seqpacker").Packer(capacity, strategy="obfd")
    return lambda: len(packer.pack_flat(lengths)[1]) + 1  # it gives the places where to split


PEER_PACKERS: dict[str, Callable[[Int64Array, int], Packer]] = {
    "lightbinpack": lightbinpack_packer,
    "seqpacker": seqpacker_packer,
}


def _counting(packer: Packer, name: str, bins: dict[str, int]) -> Callable[[], None]:
    """The packer as a candidate that is timed, its number of bins noted on the side."""

    def run() -> None:
        bins[name] = packer()

    return run


def _speed_row(case: str, name: str, spread: Spread, lengths: Int64Array, **counts: int) -> Row:
    return row(case, name, spread.rate(len(lengths)), SPEED, documents=len(lengths), **counts)


def _discard(_result: object) -> None:
    """A candidate returns nothing unless it takes the time itself."""
