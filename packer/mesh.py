"""The planner: a global batch of documents in, a balanced `StepPlan` for every rank out.

Pure and deterministic: each machine's loader plans for itself and all come to the same plan. A document gets a ring of
as many ranks as its tokens need, or as many as leave no piece dearer than a fraction of the step; what fraction is best
is found by trying several and simulating the step. How rings and whole documents are placed depends on the mode, see
`free` and `waves`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

import numpy as np
import numpy.typing as npt

from seqmesh.packer import free, levels, waves
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array, as_lengths
from seqmesh.packer.offload import smallest_offloaded_rings
from seqmesh.packer.pieces import smallest_rings
from seqmesh.packer.plan import Assignment, Mesh, StepPlan, make_plan

FRACTIONS = {  # of the work of a rank, or of a rank in a wave: the most that one piece may cost
    "free": (1.0, 0.25, 0.5, 0.1, 0.7, 0.15, 0.05, 0.35, 0.025),
    "pipeline": (0.05, 0.1, 0.035, 0.07, 0.25, 0.025),
    "waves": (0.5, 2.0, 0.06, 0.25, 1.0, 0.03, 0.12, 4.0, 0.075, 0.04, 0.09, 0.18),
}
FULLNESS = (0.995, 0.95, 0.85)  # of the waves
GOOD_ENOUGH, GOOD_ENOUGH_IF_LARGE = 2000, 100  # a makespan within this part of the lower bound ends the search
# Makespans within this part of the lower bound are alike: then fewer micro-batches and pieces are better. A wave less
# saves engines that gather parameters in each wave more than a per cent of the step.
ALIKE = {"free": 500, "waves": 100}
SHORTEST_PIECE = 128  # tokens, two chunks of half an attention tile: only memory asks for shorter ones
TRIES_WORK = {"free": 1 << 15, "waves": 1 << 21}  # of all tries together, so that large meshes are planned in time
FEWEST_TRIES, FEW_TRIES = 2, 4


def plan_step(
    lengths: npt.ArrayLike, mesh: Mesh, cost: CostModel, *, supervised: npt.ArrayLike | None = None
) -> StepPlan:
    """Plan one step.

    supervised [D]: supervised tokens of each document; by default all but its last token. Raises ValueError for bad
    lengths or for a document that no ring of the mesh holds, naming it.
    """
    checked = as_lengths(lengths)
    learned = np.maximum(checked - 1, 0) if supervised is None else as_lengths(supervised, name="supervised")
    smallest = _smallest_rings(checked, mesh, cost)
    best: StepPlan | None = None
    tries = _tries(mesh, len(checked))
    bound = mesh.lower_bound(checked, cost)
    good_enough = GOOD_ENOUGH if tries > FEW_TRIES else GOOD_ENOUGH_IF_LARGE
    for assignment in islice(_candidates(checked, smallest, mesh, cost, bound), tries):
        plan = make_plan(checked, assignment, mesh, cost, supervised_tokens=int(learned.sum()), bound=bound)
        if best is None or _rating(plan) < _rating(best):
            best = plan
        if best.makespan <= bound + bound // good_enough:
            break
    assert best is not None
    return best


def _rating(plan: StepPlan) -> tuple[int, int, int, int]:
    """The less the better."""
    alike = plan.makespan * ALIKE[plan.mode] // max(plan.lower_bound, 1)
    return alike, int(plan.waves.sum()), len(plan.document), plan.makespan


def _smallest_rings(lengths: Int64Array, mesh: Mesh, cost: CostModel) -> Int64Array:
    rings = smallest_rings(lengths, mesh.capacity)
    if mesh.offload is not None:
        rings = smallest_offloaded_rings(lengths, mesh.capacity, cost, mesh.offload)
    if len(rings) and int(rings.max()) > mesh.ranks:
        worst = int(rings.argmax())
        raise ValueError(
            f"document {worst} has {int(lengths[worst])} tokens: needs a ring of {int(rings[worst])} ranks of "
            f"{mesh.capacity} tokens, there are {mesh.ranks}"
        )
    return rings


def _candidates(
    lengths: Int64Array, smallest: Int64Array, mesh: Mesh, cost: CostModel, bound: int
) -> Iterator[Assignment]:
    """Assignments for several ring sizes, the most promising first."""
    costs = cost.of(lengths)
    even = bound * mesh.stages  # work of a rank, whatever its stages
    if mesh.mode == "waves":
        even = -(-even * mesh.capacity * mesh.ranks // max(int(lengths.sum()), 1))  # of one wave
    widest = _widest(lengths, mesh, cost)
    sizes = [
        _ring_sizes(smallest, np.minimum(-(-costs // max(int(part * even), 1)), widest), mesh)
        for part in FRACTIONS["pipeline" if mesh.stages > 1 else mesh.mode]
    ]
    if mesh.mode == "waves":
        yield from (waves.place(lengths, each, mesh, cost, full) for full, each in product(FULLNESS, sizes))
        return
    # Last, whatever is spread over all ranks: even whatever else there is, where links are no matter.
    sizes.append(np.where((sizes[0] > 1) & (widest >= mesh.ranks), mesh.ranks, sizes[0]))
    for each in sizes:
        yield from levels.candidates(free.place(lengths, each, mesh, cost), lengths, mesh, cost, mesh.stages)


def _tries(mesh: Mesh, documents: int) -> int:
    """How many candidates are affordable: a try takes time in proportion to ranks and documents, in `waves` to their
    product."""
    work = mesh.ranks + documents if mesh.mode == "free" else mesh.ranks * documents
    return max(FEWEST_TRIES, TRIES_WORK[mesh.mode] // (work + 1))


def _widest(lengths: Int64Array, mesh: Mesh, cost: CostModel) -> Int64Array:
    """The widest ring that each document may get to even out work: of pieces not shorter than `SHORTEST_PIECE`, and in
    mode `waves`, where all wait for the dearest rank, of members whose own attention hides the traffic: one of D
    attends to about L² / 2D pairs and gets at most L rows.
    """
    longest = np.maximum(lengths // SHORTEST_PIECE, 1)
    if mesh.mode == "free":
        return longest
    inside = np.full_like(lengths, mesh.node)
    if cost.row_near:
        inside = np.minimum(inside, 1 + cost.quadratic * lengths // (2 * cost.row_near))
    outside = np.full_like(lengths, mesh.ranks)
    if cost.row_far:
        outside = 1 + cost.quadratic * lengths // (2 * cost.row_far)
    outside = np.where(outside > mesh.node, outside, 1)
    return np.minimum(np.maximum(inside, outside), longest)


def _ring_sizes(smallest: Int64Array, wanted: Int64Array, mesh: Mesh) -> Int64Array:
    """As many ranks as the tokens need, or as are wanted; in `waves` of more than a node whole nodes."""
    sizes = np.minimum(np.maximum(smallest, wanted), mesh.ranks)
    if mesh.mode == "waves":
        sizes = np.where(sizes > mesh.node, np.minimum(-(-sizes // mesh.node) * mesh.node, mesh.ranks), sizes)
    return np.asarray(sizes, np.int64)
