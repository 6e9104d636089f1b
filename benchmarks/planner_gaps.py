"""How far plans are from the lower bound, over lists, meshes, costs and seeds: ours and the baselines.

In: cases and seeds. Out: a row for each case and candidate, and the figures `gap_*`, `fill_waves` and
`excess_vs_algorithm2`. A lower bound is what no plan can beat, not what one can reach: gaps are at most so large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from seqmesh.benchmarks.baselines.balance_scheduler import Options
from seqmesh.benchmarks.baselines.byte_scale import naive_hdp
from seqmesh.benchmarks.baselines.differencing import cut, differencing
from seqmesh.benchmarks.baselines.static_mesh import static_mesh
from seqmesh.benchmarks.baselines.wave_scheduler import wave_scheduler
from seqmesh.benchmarks.harness import Results, Row, Spread, count_ratio, row
from seqmesh.benchmarks.planner_cases import (
    ALGORITHM_2,
    COMPUTE,
    COSTS,
    SEQMESH,
    Case,
    Planner,
    Simulated,
    best_balanced,
    ours,
    ratio_row,
    simulated,
    summary_rows,
)
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.plan import Mode

FULL = 0.98  # of all room of so many waves: tokens of the cases that waves should nearly fill
WAVES = 8
POWERS_OF_TWO = "waves of powers of two"
DIFFERENCING = "Karmarkar-Karp"

Found = dict[str, list[Simulated]]  # by cost, all steps


def baselines(grid: Sequence[Options]) -> dict[str, Planner]:
    """Those that keep rings, by name."""
    return {
        ALGORITHM_2: lambda lengths, mesh, cost: best_balanced(lengths, mesh, cost, grid),
        "Algorithm 1": lambda lengths, mesh, cost: simulated(lengths, naive_hdp(lengths, mesh), mesh, cost),
        "static mesh": lambda lengths, mesh, cost: simulated(lengths, static_mesh(lengths, mesh), mesh, cost),
        POWERS_OF_TWO: lambda lengths, mesh, cost: simulated(lengths, wave_scheduler(lengths, mesh), mesh, cost),
    }


def planned(case: Case, planner: Planner, mode: Mode, seeds: int) -> list[Simulated]:
    """One candidate on the case's first steps."""
    return [planner(case.draw(seed), case.mesh(mode), COSTS[case.cost]) for seed in range(seeds)]


def gaps(cases: Sequence[Case], mode: Mode, seeds: int, peers: dict[str, Planner], peer_seeds: int) -> Results:
    """Ours on all seeds, the others on the first ones; the worst and the median of all cases."""
    found: Found = {case.cost: [] for case in cases}
    rows: list[Row] = []
    beside: list[tuple[Simulated, Simulated]] = []
    for case in cases:
        steps = planned(case, ours, mode, seeds)
        others = {name: planned(case, peer, mode, peer_seeds) for name, peer in peers.items()}
        found[case.cost] += steps
        rows += [ratio_row(f"{mode} {case.name}", name, each) for name, each in {SEQMESH: steps, **others}.items()]
        if case.cost in COMPUTE and ALGORITHM_2 in others:
            beside += zip(steps, others[ALGORITHM_2], strict=False)  # the first steps are the same
    figures = free_figures(found) + excess(beside) if mode == "free" else waves_figures(found)
    return Results(rows=tuple(rows)) + figures


def free_figures(found: Found) -> Results:
    """Both costs of compute together; links apart."""
    compute = [step for cost in COMPUTE for step in found.get(cost, [])]
    return summary("gap_free", "free, compute", compute) + summary("gap_free_links", "free, links", found["links"])


def waves_figures(found: Found) -> Results:
    results = Results()
    for cost, steps in found.items():
        results += summary(f"gap_waves_{cost}", f"waves, {cost}", steps)
    return results


def summary(figure: str, case: str, steps: Sequence[Simulated]) -> Results:
    """The median and the worst of all these steps."""
    middle, worst = summary_rows(case, steps)
    ratios = (
        count_ratio(f"{figure}_median", middle, "makespan", "bound"),
        count_ratio(f"{figure}_worst", worst, "makespan", "bound"),
    )
    return Results(rows=(middle, worst), ratios=ratios)


def excess(beside: Sequence[tuple[Simulated, Simulated]]) -> Results:
    """What ours is over the bound, as a fraction of what Algorithm 2 is on the same step: the median step's."""
    overs = [(own.makespan - own.bound, max(other.makespan - other.bound, 1)) for own, other in beside]
    overs.sort(key=lambda pair: pair[0] / pair[1])
    over, other_over = overs[len(overs) // 2]
    counts = {"steps": len(overs), "ours": over, "algorithm_2": other_over}
    spread = Spread.of([own / other for own, other in overs])
    found = row("excess over the bound", "median", spread, "of Algorithm 2's", **counts)
    return Results(rows=(found,), ratios=(count_ratio("excess_vs_algorithm2", found, "ours", "algorithm_2"),))


def whole_documents(cases: Sequence[Case], seeds: int) -> Results:
    """Documents cut at the capacity, for a planner without rings, beside ours on the same segments."""
    rows: list[Row] = []
    for case in cases:
        steps = [cut(case.draw(seed), case.capacity) for seed in range(seeds)]
        rows += [
            ratio_row(f"cut {case.name}", SEQMESH, [ours(each, case.mesh(), COSTS[case.cost]) for each in steps]),
            ratio_row(f"cut {case.name}", DIFFERENCING, [_differenced(each, case) for each in steps]),
        ]
    return Results(rows=tuple(rows))


def _differenced(lengths: Int64Array, case: Case) -> Simulated:
    mesh, cost = case.mesh(), COSTS[case.cost]
    return simulated(lengths, differencing(lengths, mesh, cost), mesh, cost)


def fills(cases: Sequence[Case], seeds: int) -> Results:
    """How full waves are on steps of 0.98 times the room of eight waves: the worst case of all, and the median one.

    Only with a cost of launches, in `links`, is a plan with more waves than needed dearer for that alone.
    """
    rows = [_fill(replace(case, tokens=int(FULL * case.ranks * case.capacity * WAVES)), seeds) for case in cases]
    rows.sort(key=lambda found: found.counts["tokens"] / found.counts["room"])
    ratios = (
        count_ratio("fill_waves", rows[0], "tokens", "room"),
        count_ratio("fill_waves_median", rows[len(rows) // 2], "tokens", "room"),
    )
    return Results(rows=tuple(rows), ratios=ratios)


def _fill(case: Case, seeds: int) -> Row:
    """Tokens over room; counts are those of the step with the most waves."""
    waves = []
    for seed in range(seeds):
        plan = plan_step(case.draw(seed), case.mesh("waves"), COSTS[case.cost])
        waves.append(int(np.max(plan.waves)))
    rooms = [count * case.ranks * case.capacity for count in waves]
    spread = Spread.of([case.tokens / room for room in rooms])
    return row(f"fill {case.name}", SEQMESH, spread, "of the room", tokens=case.tokens, room=max(rooms))
