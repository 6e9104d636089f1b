"""Who reads and who writes what all replicas have."""

from __future__ import annotations

from heapq import heapreplace

from seqmesh.trainer.part import Saved


def share_out(tensors: Saved, replicas: int) -> dict[str, int]:
    """For each shared tensor the replica that reads or writes it for all, so that each has about as many bytes. The
    same on all replicas, without a word between them."""
    shared = {name: part.local.nbytes for name, part in tensors.items() if part.shared}
    loads = [(0, replica) for replica in range(replicas)]
    chosen: dict[str, int] = {}
    for name in sorted(shared, key=lambda name: (-shared[name], name)):
        load, chosen[name] = loads[0]
        heapreplace(loads, (load + shared[name], chosen[name]))
    return chosen
