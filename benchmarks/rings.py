"""`seqmesh bench rings`: what rings send, exactly, beside splitting every document over all ranks.

Counts, not times: plans of steps of real document lengths for several meshes, and the bytes that ring attention sends
for them in one layer, forward and backward, in bfloat16 (gradients travel as float32). `static` is context parallelism
of a fixed degree: all documents of the same steps spread over all ranks, each cut in the same way. `window`: what the
planned rings send in a layer whose rows see so many keys only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from seqmesh.benchmarks.harness import Results, Row, Spread, chosen_peers, ratio, row
from seqmesh.benchmarks.lengths import STEPS, published_documents
from seqmesh.benchmarks.planner_cases import H800, NODE
from seqmesh.packer.cost import MODEL_8B
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import largest_document, piece_rows, rows_sent
from seqmesh.packer.plan import Mesh

PEERS: tuple[str, ...] = ()
CAPACITY = 8_192
TOKENS_PER_STEP = 1 << 20
MESHES = (8, 32)  # ranks
WINDOW = 64  # keys that a row sees in a layer with a sliding window
LONG = 4_096  # tokens of a document over all ranks
Draw = Callable[[int, int, int], Int64Array]  # of tokens, longest document, seed
PYTHON = STEPS["python_env"]
REAL: dict[str, Draw] = {
    "Python files": PYTHON,
    "wlbllm": STEPS["wlbllm"],
    "ProLong": STEPS["prolong"],
    "Wikipedia": lambda tokens, longest, seed: published_documents("wikipedia", tokens, longest, seed=seed),
}
# Keys and values forward and again backward, at two bytes each, and their gradients at four.
ROW_BYTES = 2 * MODEL_8B.kv_heads * MODEL_8B.head_width * (2 + 2 + 4)


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Plan the steps, count the bytes."""
    chosen_peers(PEERS, against)
    steps = 8 if quick else 64
    results = Results()
    for ranks in MESHES:
        results += compare(f"{ranks} ranks", ranks, _steps(PYTHON, ranks, steps))
    return results


def real_lists(ranks: int, steps: int) -> Results:
    """Steps of each list of real lengths; and one document over all ranks, with a window and without."""
    results = Results()
    for name, draw in REAL.items():
        results += compare(f"{ranks} ranks, {name}", ranks, _steps(draw, ranks, steps))
    return results + one_document(ranks)


def one_document(ranks: int) -> Results:
    """What all ranks send for one document of LONG tokens."""
    case = f"{ranks} ranks, one document of {LONG}"
    lengths, sizes = np.array([LONG]), np.array([ranks])
    full = _bytes(case, "rings", [int(rows_sent(lengths, sizes).sum())])
    halo = _bytes(case, f"window {WINDOW}", [halo_rows(lengths, sizes, WINDOW)])
    return Results(rows=(full, halo), ratios=(ratio("halo_vs_ring", halo, full),))


def halo_rows(lengths: Int64Array, ring_sizes: Int64Array, window: int) -> int:
    """Rows of keys and values that rings' members send each other for one causal attention with a window."""
    rows = 0
    for index in range(int(ring_sizes.max(initial=1))):
        there = ring_sizes > index
        rows += int(piece_rows(lengths[there], ring_sizes[there], np.full(int(there.sum()), index), window).sum())
    return rows


def _steps(draw: Draw, ranks: int, steps: int) -> list[Int64Array]:
    return [draw(TOKENS_PER_STEP, largest_document(ranks, CAPACITY), seed) for seed in range(steps)]


def compare(case: str, ranks: int, steps: list[Int64Array]) -> Results:
    """Bytes per step and layer of the planner's rings, of the same rings where every row sees a window only, and of
    rings over all ranks."""
    mesh = Mesh(ranks=ranks, capacity=CAPACITY, ranks_per_node=NODE)
    plans = [plan_step(lengths, mesh, MODEL_8B.cost_model(H800)) for lengths in steps]
    rings = [int(rows_sent(plan.lengths, np.diff(plan.ring_offsets)).sum()) for plan in plans]
    static = [int(rows_sent(lengths, np.full_like(lengths, ranks)).sum()) for lengths in steps]
    windowed = [halo_rows(plan.lengths, np.diff(plan.ring_offsets), WINDOW) for plan in plans]
    planned = _bytes(case, "rings", rings, documents=sum(plan.rings for plan in plans), steps=len(steps))
    fixed = _bytes(case, "static", static, documents=sum(map(len, steps)), steps=len(steps))
    halo = _bytes(case, f"window {WINDOW}", windowed, steps=len(steps))
    ratios = ratio("ring_bytes_vs_static", planned, fixed), ratio("halo_vs_ring", halo, planned)
    return Results(rows=(planned, fixed, halo), ratios=ratios)


def _bytes(case: str, name: str, rows: list[int], **counts: int) -> Row:
    return row(case, name, Spread.of([count * ROW_BYTES for count in rows]), "bytes/step/layer", **counts)
