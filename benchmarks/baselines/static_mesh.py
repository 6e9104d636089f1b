"""Static mesh: data parallelism times context parallelism of one degree, for every document.

In: lengths, ranks, capacity. Out: an `Assignment`. Documents are packed by best fit into packs of at most cp · capacity
tokens, and every document of a pack is spread over all cp ranks of a group, in the same zigzag as rings (ByteScale's
own baseline balances packs in this way). cp is the smallest divisor of the ranks that holds the longest document, or
the context where one is named.

Packs go to groups round by round in the order of their first documents: balanced by count, not by work. `by_tokens`
gives each, the fullest first, to the group with the fewest tokens instead.

A rank's share of a pack is its tokens over cp up to rounding, a token or two for each document, which may leave it a
little over the capacity: real meshes pad the pack, here that is free.
"""

from __future__ import annotations

import numpy as np

from seqmesh.benchmarks.baselines.placement import Placement, packs_of
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.plan import Assignment, Mesh


def static_mesh(lengths: Int64Array, mesh: Mesh, *, context: int | None = None, by_tokens: bool = False) -> Assignment:
    degree = context_parallel(mesh, max(int(lengths.max()), context or 1))
    packs = packs_of(lengths, np.arange(len(lengths)), degree * mesh.capacity)
    packs.sort(key=lambda pack: int(pack[0]))
    tokens = [int(lengths[pack].sum()) for pack in packs]
    groups = mesh.ranks // degree
    dealt = fewest_tokens(tokens, groups) if by_tokens else [at % groups for at in range(len(packs))]
    placement, waves = Placement(), [0] * groups
    for pack, group in zip(packs, dealt, strict=True):
        placement.put(pack, range(group * degree, (group + 1) * degree), waves[group])
        waves[group] += 1
    return placement.assignment()


def context_parallel(mesh: Mesh, longest: int) -> int:
    """Ranks of a group. Raises ValueError where not even all ranks hold the longest document."""
    for degree in range(1, mesh.ranks + 1):
        if mesh.ranks % degree == 0 and degree * mesh.capacity >= longest:
            return degree
    raise ValueError(f"a document of {longest} tokens: {mesh.ranks} ranks hold {mesh.ranks * mesh.capacity}")


def fewest_tokens(tokens: list[int], groups: int) -> list[int]:
    """The group of each pack, the fullest pack first, each to the group with the fewest tokens."""
    loads, dealt = [0] * groups, [0] * len(tokens)
    for pack in sorted(range(len(tokens)), key=lambda at: -tokens[at]):
        dealt[pack] = loads.index(min(loads))
        loads[dealt[pack]] += tokens[pack]
    return dealt
