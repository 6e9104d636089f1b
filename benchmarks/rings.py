"""`seqmesh bench rings`: what rings send, exactly, beside splitting every document over all ranks.

Counts, not times: plans of steps of real document lengths for several meshes, and the bytes that ring attention sends
for them in one layer, forward and backward, in bfloat16 (gradients travel as float32). `static` is context parallelism
of a fixed degree: all documents of the same steps spread over all ranks, each cut in the same way.
"""

from __future__ import annotations

import numpy as np

from seqmesh.benchmarks.harness import Results, Row, Spread, chosen_peers, ratio, row
from seqmesh.benchmarks.lengths import python_documents
from seqmesh.benchmarks.planner_cases import H800, NODE
from seqmesh.packer.cost import MODEL_8B
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import largest_document, rows_sent
from seqmesh.packer.plan import Mesh

PEERS: tuple[str, ...] = ()
CAPACITY = 8_192
TOKENS_PER_STEP = 1 << 20
MESHES = (8, 32)  # ranks
# Keys and values forward and again backward, at two bytes each, and their gradients at four.
ROW_BYTES = 2 * MODEL_8B.kv_heads * MODEL_8B.head_width * (2 + 2 + 4)


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Plan the steps, count the bytes."""
    chosen_peers(PEERS, against)
    steps = 8 if quick else 64
    results = Results()
    for ranks in MESHES:
        lengths = [
            python_documents(TOKENS_PER_STEP, largest_document(ranks, CAPACITY), seed=seed) for seed in range(steps)
        ]
        results += compare(ranks, lengths)
    return results


def compare(ranks: int, steps: list[Int64Array]) -> Results:
    """Bytes per step and layer of the planner's rings and of rings over all ranks."""
    case = f"{ranks} ranks"
    mesh = Mesh(ranks=ranks, capacity=CAPACITY, ranks_per_node=NODE)
    plans = [plan_step(lengths, mesh, MODEL_8B.cost_model(H800)) for lengths in steps]
    rings = [int(rows_sent(plan.lengths, np.diff(plan.ring_offsets)).sum()) for plan in plans]
    static = [int(rows_sent(lengths, np.full_like(lengths, ranks)).sum()) for lengths in steps]
    planned = _bytes(case, "rings", rings, documents=sum(plan.rings for plan in plans), steps=len(steps))
    fixed = _bytes(case, "static", static, documents=sum(map(len, steps)), steps=len(steps))
    return Results(rows=(planned, fixed), ratios=(ratio("ring_bytes_vs_static", planned, fixed),))


def _bytes(case: str, name: str, rows: list[int], **counts: int) -> Row:
    return row(case, name, Spread.of([count * ROW_BYTES for count in rows]), "bytes/step/layer", **counts)
