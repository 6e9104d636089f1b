"""`seqmesh bench planner`: how good step plans are, beside a lower bound and beside planners written from papers.

gaps: simulated makespan over the lower bound, on three lists of real lengths, with costs of compute alone and with
links; in mode `waves` too, with how full waves are (see `planner_gaps`). stages: ByteScale's ablation in simulation
(`planner_stages`). times: CPU milliseconds of `plan_step` up to 12,288 ranks (`planner_times`). The baselines are in
`baselines`: each says what its paper describes, and what it chose where that is silent. No training is done: all
figures but times follow from the cost model and the simulation, and repeat exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from seqmesh.benchmarks.baselines.balance_scheduler import Options, grid
from seqmesh.benchmarks.harness import Results, chosen_peers
from seqmesh.benchmarks.planner_cases import COSTS, Case, K, M
from seqmesh.benchmarks.planner_gaps import POWERS_OF_TWO, baselines, fills, gaps, whole_documents
from seqmesh.benchmarks.planner_stages import stages
from seqmesh.benchmarks.planner_times import LARGE, SIZES, times

PEERS: tuple[str, ...] = ()
LISTS = ("wlbllm", "prolong", "python_env")
MESHES = (  # ranks, capacity, tokens per step
    (8, 16 * K, M),
    (32, 8 * K, 2 * M),
    (64, 4 * K, 2 * M),
    (64, 8 * K, 8 * M),
    (8, 8 * K, M),
    (16, 16 * K, 4 * M),
    (64, 16 * K, 8 * M),
)
SHAPES = ("byted", "github")

MeshSize = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. peer_seeds: steps of each case that baselines plan too. stages: ranks of the ablation,
    whose step is 32K tokens for each of them. large: ranks that stand for 12,288."""

    lists: tuple[str, ...] = LISTS
    meshes: tuple[MeshSize, ...]
    seeds: int
    peer_seeds: int
    grid: Sequence[Options]
    shapes: tuple[str, ...] = SHAPES
    stages: int = 1_024
    stage_seeds: int
    large: int = LARGE
    sizes: tuple[int, ...] = SIZES
    repeats: int

    def cases(self, costs: Sequence[str]) -> list[Case]:
        return [
            Case(lengths=name, ranks=ranks, capacity=capacity, tokens=tokens, cost=cost)
            for name, (ranks, capacity, tokens), cost in product(self.lists, self.meshes, costs)
        ]


QUICK = Scale(
    shapes=SHAPES[:1],
    meshes=MESHES[:3],
    seeds=2,
    peer_seeds=1,
    grid=grid((0.02,), (4, 16)),
    stage_seeds=2,
    repeats=3,
    sizes=SIZES[:3],
)
FULL = Scale(meshes=MESHES, seeds=10, peer_seeds=2, grid=grid(), stage_seeds=5, repeats=7)


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    chosen_peers(PEERS, against)
    return measured(QUICK if quick else FULL)


def measured(scale: Scale) -> Results:
    """All parts at one scale."""
    peers = baselines(scale.grid)
    waves = {POWERS_OF_TWO: peers[POWERS_OF_TWO]}
    results = gaps(scale.cases(tuple(COSTS)), "free", scale.seeds, peers, scale.peer_seeds)
    results += whole_documents(scale.cases(("linear",)), scale.peer_seeds)
    results += gaps(scale.cases(tuple(COSTS)), "waves", scale.seeds, waves, scale.peer_seeds)
    results += fills(scale.cases(tuple(COSTS)), scale.peer_seeds)
    for shape in scale.shapes:
        results += stages(stage_case(shape, scale.stages), scale.stage_seeds, scale.grid)
    return results + times(large=scale.large, sizes=scale.sizes, repeats=scale.repeats)


def stage_case(shape: str, ranks: int) -> Case:
    """The ablation's setting: 8K tokens on a rank, four micro-batches for each."""
    return Case(lengths=shape, ranks=ranks, capacity=8 * K, tokens=32 * K * ranks, cost="links")
