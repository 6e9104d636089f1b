"""How long a step of pipelines takes where every process has a core to itself, from the work of each operation.

In: the plan, which says whose rings meet, and what each operation of each process takes, in its order. Out: when the
last one ends. A process does one operation after the other; each begins when what it needs has been done, and members
of rings begin together and end with the slowest. Messages cost nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from seqmesh.packer.plan import StepPlan
from seqmesh.trainer.pipeline.order import Operation

Process = tuple[int, int]  # replica, stage
Work = Sequence[tuple[Operation, float]]
Done = dict[tuple[Process, Operation], float]


def replayed(plan: StepPlan, work: Mapping[Process, Work], *, stages: int, parts: int = 1) -> float:
    """When the last operation ends, in the unit of `work`. Raises ValueError where processes wait for each other."""
    together, done = meetings(plan), Done()
    left, clock = {process: deque(each) for process, each in work.items()}, dict.fromkeys(work, 0.0)
    while any(left.values()):
        first = {process: order[0] for process, order in left.items() if order}
        begins = {process: _begin(process, first[process][0], done, stages, parts) for process in first}
        ready = {process: first[process][0] for process, begin in begins.items() if begin is not None}
        groups = [
            (operation, tuple((each, stage) for each in sorted(together[operation.batch, replica])))
            for (replica, stage), operation in ready.items()
        ]
        met = {members for operation, members in groups if all(ready.get(each) == operation for each in members)}
        if not met:
            raise ValueError(f"all processes wait: {first}")
        for members in met:
            end = max(max(begins[each] or 0.0, clock[each]) for each in members)
            end += max(first[each][1] for each in members)
            for each in members:
                done[each, left[each].popleft()[0]] = clock[each] = end
    return max(clock.values(), default=0.0)


def meetings(plan: StepPlan) -> dict[tuple[int, int], frozenset[int]]:
    """By micro-batch and rank, all ranks that rings connect with this one there, directly or not."""
    found = {(int(wave), int(rank)): frozenset([int(rank)]) for wave, rank in zip(plan.wave, plan.rank, strict=True)}
    first = np.unique(plan.document, return_index=True)[1]
    for document, wave in zip(plan.document[first].tolist(), plan.wave[first].tolist(), strict=True):
        ring = plan.ring_ranks[plan.ring_offsets[document] : plan.ring_offsets[document + 1]].tolist()
        joined = frozenset().union(*(found[wave, rank] for rank in ring))
        found |= {(wave, rank): joined for rank in joined}
    return found


def _begin(process: Process, operation: Operation, done: Done, stages: int, parts: int) -> float | None:
    """When what an operation needs from elsewhere has been done; None where it has not."""
    replica, stage = process
    virtual = operation.part * stages + stage
    last = operation.backward and virtual == stages * parts - 1
    source = virtual if last else virtual + (1 if operation.backward else -1)
    if source < 0:
        return 0.0
    needed = Operation(operation.batch, source // stages, operation.backward and not last)
    return done.get(((replica, source % stages), needed))
