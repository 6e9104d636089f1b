"""What the planner benchmark's parts share: cases, costs, and plans reduced to how long they take.

A case is a step: documents of a named list, a mesh, a cost. Every candidate's assignment is timed by the same
simulation (`make_plan`) under the same cost model, and held against the same lower bound. Nothing is measured here but
simulated time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqmesh.benchmarks.baselines.balance_scheduler import Options, balanced_hdp
from seqmesh.benchmarks.harness import Ratio, Row, Spread, row
from seqmesh.benchmarks.lengths import SEED, STEPS
from seqmesh.packer.cost import PAIR_UNITS, CostModel, Machine, ModelShape
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import largest_document
from seqmesh.packer.plan import Assignment, Mesh, Mode, StepPlan, make_plan

SEQMESH = "seqmesh"
ALGORITHM_2 = "Algorithm 2, best of a grid"
UNIT = "makespan/bound"
K, M = 1 << 10, 1 << 20

# The published sizes of LLaMA 7B, but with the 8 groups of keys and values that ByteScale's evaluation uses.
MODEL_7B = ModelShape(layers=32, width=4_096, heads=32, kv_heads=8, head_width=128, ffn_width=11_008, vocab_size=32_000)
# H800, from its data sheet: 989 TFLOPS of dense bfloat16, of which 40 % are reached; NVLink of 400 GB/s, half of it
# each way. One 400 Gb/s network card for each device. 2 ms to launch a micro-batch, a guess.
H800 = Machine(flops=4e14, near=2e11, far=5e10, launch=2e-3)
NODE = 8  # ranks

COSTS = {
    "quadratic": CostModel(quadratic=2),
    "linear": CostModel(linear=37_000, quadratic=2),
    "links": MODEL_7B.cost_model(H800),
}
"""Attention alone; with 37,000 · s beside s²; a model and a machine with launches and links, in nodes of eight."""
COMPUTE = ("quadratic", "linear")
UNITS_PER_SECOND = H800.flops * PAIR_UNITS / MODEL_7B.flops_per_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """capacity, tokens: of a rank's micro-batch, of the step."""

    lengths: str
    ranks: int
    capacity: int
    tokens: int
    cost: str

    @property
    def name(self) -> str:
        return f"{self.lengths}, {self.ranks} x {self.capacity // K}K, {self.tokens / M:.4g}M, {self.cost}"

    def mesh(self, mode: Mode = "free") -> Mesh:
        return Mesh(
            ranks=self.ranks, capacity=self.capacity, mode=mode, ranks_per_node=NODE if self.cost == "links" else None
        )

    def draw(self, seed: int) -> Int64Array:
        """Documents that the mesh holds, clipped where they are longer."""
        return STEPS[self.lengths](self.tokens, largest_document(self.ranks, self.capacity), SEED + seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """How long a plan takes, and what no plan can beat."""

    makespan: int
    bound: int

    @classmethod
    def of(cls, plan: StepPlan) -> Simulated:
        return cls(makespan=plan.makespan, bound=plan.lower_bound)

    @property
    def ratio(self) -> float:
        return self.makespan / self.bound


Planner = Callable[[Int64Array, Mesh, CostModel], Simulated]


def ours(lengths: Int64Array, mesh: Mesh, cost: CostModel) -> Simulated:
    return Simulated.of(plan_step(lengths, mesh, cost))


def simulated(lengths: Int64Array, assignment: Assignment, mesh: Mesh, cost: CostModel) -> Simulated:
    """A baseline's assignment, in the simulation that times our plans."""
    return Simulated.of(make_plan(lengths, assignment, mesh, cost, supervised_tokens=0))


def best_balanced(
    lengths: Int64Array, mesh: Mesh, cost: CostModel, options: Sequence[Options], rings: Int64Array | None = None
) -> Simulated:
    """Algorithm 2 with the options that suit this very step best."""
    assignments = (balanced_hdp(lengths, mesh, cost, each, rings=rings) for each in options)
    return min((simulated(lengths, each, mesh, cost) for each in assignments), key=lambda found: found.makespan)


def ratio_row(case: str, candidate: str, found: Sequence[Simulated]) -> Row:
    """Makespans over bounds; counts are those of the worst."""
    return _row(case, candidate, found, max(found, key=lambda each: each.ratio))


def summary_rows(case: str, found: Sequence[Simulated]) -> tuple[Row, Row]:
    """The median (the upper one of an even number) and the worst of many plans."""
    ordered = sorted(found, key=lambda each: each.ratio)
    middle, worst = ordered[len(ordered) // 2], ordered[-1]
    return _row(case, "median", ordered, middle), _row(case, "worst", [worst], worst)


def _row(case: str, candidate: str, found: Sequence[Simulated], counted: Simulated) -> Row:
    spread = Spread.of([each.ratio for each in found])
    return row(case, candidate, spread, UNIT, steps=len(found), makespan=counted.makespan, bound=counted.bound)


def seconds_row(case: str, candidate: str, makespans: Sequence[int]) -> Row:
    """Simulated seconds of `MODEL_7B` on `H800`; total: of all steps."""
    seconds = [makespan / UNITS_PER_SECOND for makespan in makespans]
    return row(case, candidate, Spread.of(seconds), "simulated s", steps=len(seconds), total=sum(seconds))


def total_ratio(figure: str, numerator: Row, denominator: Row) -> Ratio:
    """Of all steps together, as a run's throughput would show it."""
    value = numerator.counts["total"] / denominator.counts["total"]
    return Ratio(
        figure=figure, value=value, numerator=f"{numerator.name}:total", denominator=f"{denominator.name}:total"
    )
