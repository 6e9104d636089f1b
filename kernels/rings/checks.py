"""What is refused before any message: rings that contradict the layout, and exchanges that cannot do what is asked.

All members of a ring come to the same verdict, so none is left waiting for another.
"""

from __future__ import annotations

from itertools import pairwise

import torch.distributed as dist

from seqmesh.kernels.layout import Layout, Ring
from seqmesh.kernels.rings.choose import EXCHANGES


def check_exchange(layout: Layout, exchange: str, *, causal: bool, window: int | None) -> None:
    """Raise ValueError for an exchange that is not known or has no window, NotImplementedError for a window over rings
    without causal."""
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange is {exchange!r}: must be one of {', '.join(map(repr, EXCHANGES))}")
    if exchange == "ring" and window is not None:
        raise ValueError(f"exchange is 'ring' and window is {window}: it has no window, use 'gather' or 'auto'")
    if window is not None and not causal and any(ring.size > 1 for ring in layout.rings):
        raise NotImplementedError(
            f"window is {window} without causal, and the layout has rings: over ranks a window must look back only"
        )


def check_rings(layout: Layout) -> None:
    """Raise ValueError for rings that contradict the layout, themselves, or the process group.

    RuntimeError where a ring of several ranks meets no process group. Whether members agree is not checked: that needs
    messages, and the plan's validator sees to it. Where cu_seqlens lie on a device they are not read, to wait for
    nothing: rings are then checked against each other only.
    """
    for i, ring in enumerate(layout.rings):
        name = f"rings[{i}]"
        _check_ring(name, ring)
        if not 0 <= ring.segment < len(layout.cu_seqlens) - 1:
            raise ValueError(f"{name}.segment is {ring.segment}: the layout has {len(layout.cu_seqlens) - 1} segments")
        if ring.size > 1:
            _check_group(name, ring)
    if len({ring.segment for ring in layout.rings}) != len(layout.rings):
        raise ValueError(f"rings have segments {[ring.segment for ring in layout.rings]}: must be distinct")
    _check_order(layout)
    if layout.cu_seqlens.device.type == "cpu":
        _check_places(layout)


def _check_ring(name: str, ring: Ring) -> None:
    if len(set(ring.ranks)) != ring.size or ring.size == 0:
        raise ValueError(f"{name}.ranks is {ring.ranks}: must be distinct ranks, at least one")
    if not 0 <= ring.index < ring.size:
        raise ValueError(f"{name}.index is {ring.index}: must be from 0 to {ring.size - 1}")
    if len(ring.chunks) != 2 * ring.size or min(ring.chunks) < 0:
        raise ValueError(f"{name}.chunks is {ring.chunks}: must be {2 * ring.size} sizes, none negative")


def _check_group(name: str, ring: Ring) -> None:
    if not dist.is_initialized():
        raise RuntimeError(f"{name} has {ring.size} ranks and there is no process group: initialise it first")
    if not 0 <= min(ring.ranks) <= max(ring.ranks) < dist.get_world_size():
        raise ValueError(f"{name}.ranks is {ring.ranks}: the process group has ranks 0 to {dist.get_world_size() - 1}")
    if ring.ranks[ring.index] != dist.get_rank():
        raise ValueError(f"{name}: member {ring.index} of {ring.ranks} is not this rank, {dist.get_rank()}")


def _check_places(layout: Layout) -> None:
    bounds = layout.cu_seqlens.tolist()
    for i, ring in enumerate(layout.rings):
        start, stop = bounds[ring.segment], bounds[ring.segment + 1]
        if ring.start != start:
            raise ValueError(f"rings[{i}].start is {ring.start}: segment {ring.segment} begins at row {start}")
        if stop - start != ring.held(ring.index):
            raise ValueError(
                f"rings[{i}]: segment {ring.segment} has {stop - start} rows, "
                f"its two chunks have {ring.held(ring.index)}"
            )


def _check_order(layout: Layout) -> None:
    in_order = sorted(layout.rings, key=lambda ring: ring.segment)
    for before, after in pairwise(in_order):
        if before.rows.stop > after.start:
            raise ValueError(
                f"segment {after.segment} begins at row {after.start}, before row {before.rows.stop}, where segment "
                f"{before.segment} ends: rings must lie apart"
            )
