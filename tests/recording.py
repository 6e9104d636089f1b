"""What processes exchange, as they do it: collectives by torch's flight recorder, messages between two by one of ours.

gloo (torch 2.13) records every collective of every group with the number that it has in the group, but no messages.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]  # its stub forgets it

from seqmesh.kernels.rings import messages as rings
from seqmesh.trainer.pipeline import messages as pipeline
from seqmesh.trainer.replicas import tied

ENTRIES = 100_000  # that the recorder keeps

Group = tuple[str, ...]  # its axis and the numbers of its members: the same on all of them
Collective = tuple[Group, int, str]  # its number in the group, and what it is
Way = tuple[Group, int, int]  # from one process to another


@dataclass(slots=True)
class Trace:
    """Of one process. collectives: in its order. sent, received: bytes of each message on each way, in its order.
    groups: that it is a member of."""

    collectives: list[Collective] = field(default_factory=list)
    sent: dict[Way, list[int]] = field(default_factory=dict)
    received: dict[Way, list[int]] = field(default_factory=dict)
    groups: set[Group] = field(default_factory=set)


def switch_on() -> None:
    """To be called before a process makes its first group."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(ENTRIES)


def groups_now() -> dict[str, Group]:
    """By the name that torch gave them."""
    world = dist.distributed_c10d._world
    return {
        name: (group.group_desc, *map(str, sorted(world.pg_group_ranks[group])))
        for group, name in world.pg_names.items()
    }


@contextmanager
def traced() -> Iterator[Trace]:
    """All that this process exchanges in the block; it makes no group there."""
    trace, begun, names = Trace(), len(_entries()), groups_now()
    trace.groups = set(names.values())
    with _messages(trace):
        yield trace
    assert groups_now() == names, "a group was made or unmade"
    for entry in _entries()[begun:]:
        group = names[entry["process_group"][0]]
        trace.collectives.append((group, entry["collective_seq_id"], entry["profiling_name"]))


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(_dump_fr_trace_json())["entries"]
    assert len(entries) < ENTRIES
    return entries


class _Watched:
    """`torch.distributed`, but for some of its functions."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextmanager
def _messages(trace: Trace) -> Iterator[None]:
    me = dist.get_rank()

    def note(sends: bool, rows: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        name = groups_now()[(group or dist.distributed_c10d._get_default_group()).group_name]
        way = (name, me, peer) if sends else (name, peer, me)
        (trace.sent if sends else trace.received).setdefault(way, []).append(rows.numel() * rows.element_size())

    def watched(name: str, end: str) -> Callable[..., Any]:
        def call(rows: Tensor, *, group: dist.ProcessGroup | None, **ends: int) -> Any:
            peer = ends[end] if group is None else dist.get_global_rank(group, ends[end])
            note(name.endswith("send"), rows, peer, group)
            return getattr(dist, name)(rows, group=group, **ends)

        return call

    def batch(operations: Sequence[dist.P2POp]) -> Any:
        for each in operations:
            note(each.op is dist.isend, each.tensor, each.peer, each.group)
        return dist.batch_isend_irecv(list(operations))

    functions = {name: watched(name, "group_dst") for name in ("send", "isend")}
    functions |= {name: watched(name, "group_src") for name in ("recv", "irecv")}
    pipeline.dist = tied.dist = _Watched(functions)  # type: ignore[assignment, attr-defined]  # stand-ins
    rings.dist = _Watched({"batch_isend_irecv": batch})  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        pipeline.dist = tied.dist = rings.dist = dist  # type: ignore[attr-defined]
