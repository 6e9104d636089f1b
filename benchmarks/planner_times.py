"""How long `plan_step` takes, up to 12,288 ranks, and how good its plans are there. CPU milliseconds, one thread.

Figures: `gap_12288` and `plan_ms_12288` for documents of up to 2M tokens on 12,288 ranks in nodes of eight; `gap_1024`
and `plan_ms_1024` for web-like documents; the rest are rows. Baselines are not timed: they are written to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from seqmesh.benchmarks.harness import Results, count_ratio, measure, row
from seqmesh.benchmarks.lengths import LONGEST_CLASS, STEPS, WIDE_P99, web_lengths
from seqmesh.benchmarks.planner_cases import COSTS, NODE, SEQMESH, K, M
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import largest_document
from seqmesh.packer.plan import Mesh

LARGE = 12_288  # ranks
LARGE_STEPS = {"32M": 32 * M, "100M": 100_000_000}  # tokens
LARGE_CAPACITIES = (8 * K, 16 * K)
SIZES = (64, 256, 1_024, 4_096)  # ranks
CAPACITY = 8 * K
MICRO_BATCHES = 4  # full ones of each rank
WEB, WEB_DOCUMENTS, WEB_LONGEST = 1_024, (16_000, 1_000), 131_072
KINDS = ("linear", "links")


def times(*, large: int, sizes: Sequence[int], repeats: int) -> Results:
    """All sizes; `large` stands for the 12,288 ranks."""
    results = Results()
    for ranks in sizes:
        lengths = byted(MICRO_BATCHES * ranks * CAPACITY, ranks, CAPACITY)
        results += timed(f"plan byted on {ranks}", lengths, _mesh(ranks, CAPACITY), COSTS["linear"], repeats)
    for documents in WEB_DOCUMENTS:
        lengths = web_lengths(documents, WEB_LONGEST, p99=WIDE_P99)
        name = f"plan web128k, {documents} on {WEB}"
        results += timed(name, lengths, _mesh(WEB, CAPACITY), COSTS["linear"], repeats, "1024")
    for (name, tokens), capacity, kind in product(LARGE_STEPS.items(), LARGE_CAPACITIES, KINDS):
        lengths = byted(tokens * large // LARGE, large, capacity)
        case = f"plan byted, {name} on {LARGE} x {capacity // K}K, {kind}"
        figure = "12288" if kind == "linear" else "12288_links"
        results += timed(case, lengths, _mesh(large, capacity), COSTS[kind], repeats, figure)
    return results


def timed(
    case: str, lengths: Int64Array, mesh: Mesh, cost: CostModel, repeats: int, figure: str | None = None
) -> Results:
    """One step planned again and again. figure: the end of the figures' names."""

    def call() -> None:
        plan_step(lengths, mesh, cost)

    spread = measure({SEQMESH: call}, repeats)[SEQMESH].scaled(1e3)
    plan = plan_step(lengths, mesh, cost)
    counts = {"documents": len(lengths), "makespan": plan.makespan, "bound": plan.lower_bound, "gap": plan.gap}
    found = row(case, SEQMESH, spread, "CPU-ms", milliseconds=spread.median, plans=1, **counts)
    if figure is None:
        return Results(rows=(found,))
    ratios = (
        count_ratio(f"gap_{figure}", found, "makespan", "bound"),
        count_ratio(f"plan_ms_{figure}", found, "milliseconds", "plans"),
    )
    return Results(rows=(found,), ratios=ratios)


def byted(tokens: int, ranks: int, capacity: int) -> Int64Array:
    """Documents of up to 2M tokens, or what the ranks hold."""
    return STEPS["byted"](tokens, min(LONGEST_CLASS, largest_document(ranks, capacity)), 1)


def _mesh(ranks: int, capacity: int) -> Mesh:
    return Mesh(ranks=ranks, capacity=capacity, ranks_per_node=NODE)
