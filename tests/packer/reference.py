"""Slow and obvious versions of the packer's routines."""

from collections.abc import Sequence

from seqmesh.packer.plan import StepPlan


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[int]:
    """The textbook algorithm: every document, longest first, into the fullest bin that holds it. Bin loads."""
    loads: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b, load in enumerate(loads) if load + length <= capacity]
        if fitting:
            loads[max(fitting, key=lambda b: loads[b])] += length
        else:
            loads.append(length)
    return loads


def best_makespan(costs: Sequence[int], parts: int) -> int:
    """The optimum by trying everything; for a handful of items."""
    best = sum(costs)

    def place(item: int, loads: list[int]) -> None:
        nonlocal best
        if max(loads) >= best and item < len(costs):
            return
        if item == len(costs):
            best = min(best, max(loads))
            return
        for part in range(parts):
            loads[part] += costs[item]
            place(item + 1, loads)
            loads[part] -= costs[item]

    place(0, [0] * parts)
    return best


def finish_times(plan: StepPlan) -> list[int]:
    """When each rank is done: every rank starts its next piece as soon as it may, over and over until all are done."""
    queues = [
        [p for wave in range(int(plan.waves[rank])) for p in plan.pieces(rank, wave).tolist()]
        for rank in range(plan.ranks)
    ]
    clock = [0] * plan.ranks
    wave_now = 0
    while any(queues):
        if plan.mode == "waves" and all(not queue or plan.wave[queue[0]] > wave_now for queue in queues):
            wave_now, clock = wave_now + 1, [max(clock)] * plan.ranks
            continue
        for rank, queue in enumerate(queues):
            if not queue or (plan.mode == "waves" and plan.wave[queue[0]] > wave_now):
                continue
            document = plan.document[queue[0]]
            members = plan.ring_ranks[plan.ring_offsets[document] : plan.ring_offsets[document + 1]].tolist()
            if members[0] == rank and all(queues[m] and plan.document[queues[m][0]] == document for m in members):
                start = max(clock[m] for m in members)
                for member in members:
                    clock[member] = start + int(plan.costs[queues[member].pop(0)])
    return clock
