"""ByteScale's hybrid data parallelism without balance (its Algorithm 1), and the rings it chooses with offloading.

In: lengths, a mesh, ring sizes. Out: an `Assignment`. Every document over the capacity gets the smallest ring that
holds it, or what `offload_rings` says; the rest is packed to the capacity by best fit; rings and packs are dealt to
ranks round by round, in the order of the batch.

The paper does not say how a round is filled. Here an item goes to the first round with that many ranks left, and to the
next of them, so that no round has gaps that a later item could fill. A ring has its micro-batch alone, as described;
all its documents are on consecutive ranks of a round.

With offloading a rank may be given more tokens than the capacity, as part of the activations leave the device: such
assignments keep no promise of capacity. What offloading costs in time is not simulated, as the ratio is chosen so that
compute hides it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seqmesh.benchmarks.baselines.placement import Placement, items_of
from seqmesh.packer.cost import Machine, ModelShape, attended_pairs
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.pieces import smallest_rings
from seqmesh.packer.plan import Assignment, Mesh

KEPT_LAYERS = 2  # layers whose activations never leave the device: the last, and the one on its way


def naive_hdp(lengths: Int64Array, mesh: Mesh, *, rings: Int64Array | None = None) -> Assignment:
    """Algorithm 1. rings: of each document, by default the smallest that hold them."""
    placement, used = Placement(), list[int]()
    for item in items_of(lengths, smallest_rings(lengths, mesh.capacity) if rings is None else rings, mesh.capacity):
        wave = next((wave for wave, ranks in enumerate(used) if ranks + item.width <= mesh.ranks), len(used))
        if wave == len(used):
            used.append(0)
        placement.put(item.documents, range(used[wave], used[wave] + item.width), wave)
        used[wave] += item.width
    return placement.assignment()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """host: bytes per second between a device and its host's memory, the slower direction. bytes_per_token: of
    activations, in one layer."""

    host: float
    bytes_per_token: float


def offload_rings(
    lengths: Int64Array, capacity: int, layers: int, ratio: npt.ArrayLike, *, slack: float = 1e-9
) -> Int64Array:
    """D = ⌈(2 · s + (1 − r) · (l − 2) · s) / (l · C)⌉: ranks for a document of s tokens, of whose activations the
    fraction r is offloaded in all of l layers but two. slack: against rounding up what is whole."""
    kept = KEPT_LAYERS + (1 - np.asarray(ratio)) * (layers - KEPT_LAYERS)
    rings = np.ceil(kept * lengths / (layers * capacity) - slack)
    return np.maximum(rings, 1).astype(np.int64)


def offload_ratios(
    lengths: Int64Array, capacity: int, model: ModelShape, machine: Machine, offload: Offload
) -> npt.NDArray[np.float64]:
    """The largest ratio that a layer's forward pass hides, r = T(s) · B / Act(s), at most 1; 0 where that would not
    even free what one rank holds. T and Act shrink alike with the ring, so its size does not matter."""
    flops = model.flops_per_token * lengths + model.flops_per_pair * attended_pairs(lengths).astype(float)
    seconds = flops / 3 / model.layers / machine.flops  # a third of the work is the forward pass
    hidden = np.minimum(1.0, seconds * offload.host / (offload.bytes_per_token * lengths))
    least = np.minimum(1.0, model.layers * capacity / ((model.layers - KEPT_LAYERS) * lengths))
    return np.where((lengths > capacity) & (hidden >= least), hidden, 0.0)
