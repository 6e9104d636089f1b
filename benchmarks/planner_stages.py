"""ByteScale's ablation in simulation: what each of its steps brings over a static mesh, and ours beside them.

The setting of the paper's own ablation (arXiv 2502.21231): a 7B model, its "Byted" lengths up to 2M, 1,024 ranks of 8K
tokens, 32M tokens in a step. It found 1.59 with dynamic communication (Algorithm 1), 2.01 with offloading, 3.69 with
balance (Algorithm 2) and 3.89 with its loader. Machine and offload numbers are of public data sheets, chosen before any
result was seen, and not changed since; the paper hides what its machines are.

Figures are of all steps together, as the paper gives means of many: how many documents of 2M a step has differs a lot.
What is simulated is compute, traffic of rings and launches. What is not: the pipeline, gradients, the optimizer, and
data loading, so that `stages_loader` has no value. Offloading costs no time; assignments with it may give a rank more
tokens than the capacity, as the rest of the activations has left the device. `half` offloads at most half of each
document's activations, the ratio that the paper measured to be free at 64K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from seqmesh.benchmarks.baselines.balance_scheduler import Options, balanced_hdp
from seqmesh.benchmarks.baselines.byte_scale import Offload, naive_hdp, offload_ratios, offload_rings
from seqmesh.benchmarks.baselines.static_mesh import static_mesh
from seqmesh.benchmarks.harness import Results, Row, absent, ratio
from seqmesh.benchmarks.lengths import LONGEST_CLASS
from seqmesh.benchmarks.planner_cases import COSTS, H800, MODEL_7B, SEQMESH, Case, seconds_row, total_ratio
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import smallest_rings
from seqmesh.packer.plan import Assignment, Mesh, make_plan

# PCIe 5.0 with 16 lanes, one way; 34 bytes per token, layer and unit of width (Korthikanti et al. 2022).
OFFLOAD = Offload(host=6.4e10, bytes_per_token=34 * MODEL_7B.width)
HALF = 0.5
KINDS = {"links": COSTS["links"], "compute": MODEL_7B.cost_model()}  # the same steps with traffic and launches, without

STATIC = "static mesh"
DYNAMIC = "Algorithm 1"
BALANCED = "Algorithm 2"
OFFLOADED = ", offload"
HALVED = ", offload half"
LOADER = "remote loader, not simulated"

Assign = Callable[[], Sequence[Assignment]]  # of one step, the best of which counts
Times = dict[str, dict[str, list[int]]]  # makespans by kind of cost and candidate


@dataclass(frozen=True, slots=True)
class Figure:
    """What is divided by what, in the case of one kind of cost."""

    name: str
    numerator: str
    denominator: str
    kind: str = "links"


FIGURES = (
    Figure("stages_dynamic", STATIC, DYNAMIC),
    Figure("stages_offload", STATIC, DYNAMIC + OFFLOADED),
    Figure("stages_balance", STATIC, BALANCED + OFFLOADED),
    Figure("stages_offload_half", STATIC, DYNAMIC + HALVED),
    Figure("stages_balance_half", STATIC, BALANCED + HALVED),
    Figure("stages_balance_without_offload", STATIC, BALANCED),
    Figure("vs_paper_ring_size", BALANCED + OFFLOADED, SEQMESH),
    Figure("vs_paper_ring_size_half", BALANCED + HALVED, SEQMESH),
    Figure("vs_paper_ring_size_compute", BALANCED + OFFLOADED, SEQMESH, "compute"),
    Figure("vs_paper_ring_size_half_compute", BALANCED + HALVED, SEQMESH, "compute"),
    Figure("vs_algorithm2", BALANCED, SEQMESH),
    Figure("vs_static_traffic", STATIC, SEQMESH),
    Figure("vs_static_compute", STATIC, SEQMESH, "compute"),
)


def stages(case: Case, seeds: int, grid: Sequence[Options]) -> Results:
    """Simulated seconds of every stage, with links and without."""
    times: Times = {kind: {} for kind in KINDS}
    for seed in range(seeds):
        lengths = case.draw(seed)
        for kind, cost in KINDS.items():
            _append(times[kind], SEQMESH, plan_step(lengths, case.mesh(), cost).makespan)
        for name, assign in candidates(lengths, case.mesh(), grid).items():
            _time(name, lengths, assign(), case.mesh(), times)
    rows = {kind: _rows(f"{case.lengths}, {kind}", found) for kind, found in times.items()}
    loader = absent(f"{case.lengths}, links", LOADER, "simulated s")
    ratios = [total_ratio(f.name, rows[f.kind][f.numerator], rows[f.kind][f.denominator]) for f in FIGURES]
    ratios.append(ratio("stages_loader", rows["links"][STATIC], loader))
    return Results(rows=(*rows["links"].values(), *rows["compute"].values(), loader), ratios=tuple(ratios))


def candidates(lengths: Int64Array, mesh: Mesh, grid: Sequence[Options]) -> dict[str, Assign]:
    """The stages without ours. All plan by compute alone, so that both kinds of cost time the same assignments."""
    rings = {"": smallest_rings(lengths, mesh.capacity), **offloaded(lengths, mesh.capacity)}
    found: dict[str, Assign] = {STATIC: lambda: [static_mesh(lengths, mesh, context=_context(mesh))]}
    for suffix, chosen in rings.items():
        found[DYNAMIC + suffix] = partial(naive_only, lengths, mesh, chosen)
        found[BALANCED + suffix] = partial(balanced_all, lengths, mesh, chosen, grid)
    return found


def _context(mesh: Mesh) -> int:
    """2M tokens, or what all ranks hold."""
    return min(LONGEST_CLASS, mesh.ranks * mesh.capacity)


def offloaded(lengths: Int64Array, capacity: int) -> dict[str, Int64Array]:
    """Rings by offloading, as much as compute hides and at most half."""
    ratios = offload_ratios(lengths, capacity, MODEL_7B, H800, OFFLOAD)
    return {
        suffix: offload_rings(lengths, capacity, MODEL_7B.layers, np.minimum(ratios, most))
        for suffix, most in ((OFFLOADED, 1.0), (HALVED, HALF))
    }


def naive_only(lengths: Int64Array, mesh: Mesh, rings: Int64Array) -> list[Assignment]:
    return [naive_hdp(lengths, mesh, rings=rings)]


def balanced_all(lengths: Int64Array, mesh: Mesh, rings: Int64Array, grid: Sequence[Options]) -> list[Assignment]:
    return [balanced_hdp(lengths, mesh, KINDS["compute"], options, rings=rings) for options in grid]


def _time(name: str, lengths: Int64Array, assignments: Sequence[Assignment], mesh: Mesh, times: Times) -> None:
    """The best of some assignments, under both kinds of cost."""

    def makespan(assignment: Assignment, cost: CostModel) -> int:
        return make_plan(lengths, assignment, mesh, cost, supervised_tokens=0).makespan

    for kind, cost in KINDS.items():
        _append(times[kind], name, min(makespan(each, cost) for each in assignments))


def _append(times: dict[str, list[int]], name: str, makespan: int) -> None:
    times.setdefault(name, []).append(makespan)


def _rows(case: str, times: dict[str, list[int]]) -> dict[str, Row]:
    return {name: seconds_row(case, name, makespans) for name, makespans in times.items()}
