"""Slow and obvious versions of what the planner counts on: when micro-batches end, and the best there is."""

from collections import defaultdict
from itertools import combinations, product

from seqmesh.packer.cost import CostModel
from seqmesh.packer.pieces import piece_ranges
from seqmesh.packer.plan import Mesh, StepPlan


def micro_batch_times(plan: StepPlan, lengths: list[int], mesh: Mesh, cost: CostModel) -> dict[tuple[int, int], int]:
    """fixed + linear · tokens + max(attention, traffic) of each (rank, wave), counting every pair and every row."""
    tokens: dict[tuple[int, int], int] = defaultdict(int)
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    traffic: dict[tuple[int, int], int] = defaultdict(int)
    for piece in range(len(plan.document)):
        place = int(plan.rank[piece]), int(plan.wave[piece])
        document = int(plan.document[piece])
        ring = plan.ring_ranks[plan.ring_offsets[document] : plan.ring_offsets[document + 1]]
        far = len({int(rank) // mesh.node for rank in ring}) > 1
        (a, b), (c, d) = piece_ranges(lengths[document], int(plan.ring_size[piece]), int(plan.ring_index[piece]))
        own = {*range(a, b), *range(c, d)}
        window = cost.window or lengths[document]
        seen = {key for query in own for key in range(max(query - window + 1, 0), query + 1)}
        tokens[place] += len(own)
        pairs[place] += sum(min(query + 1, window) for query in own)
        traffic[place] += len(seen - own) * (cost.row_far if far else cost.row_near)
    return {
        place: cost.fixed + cost.linear * tokens[place] + max(cost.quadratic * pairs[place], traffic[place])
        for place in tokens
    }


def finish_times(plan: StepPlan, times: dict[tuple[int, int], int]) -> list[int]:
    """When each rank is done: whatever can begin begins, over and over. Micro-batches that share a ring begin when all
    their ranks have come to them, and last as long as the dearest."""
    partners: dict[tuple[int, int], set[tuple[int, int]]] = {place: {place} for place in times}
    for document in range(len(plan.lengths)):
        places = {
            (int(plan.rank[piece]), int(plan.wave[piece]))
            for piece in range(len(plan.document))
            if plan.document[piece] == document
        }
        connected = set().union(*(partners[place] for place in places))
        for place in connected:
            partners[place] = connected
    clock = [0] * plan.ranks
    todo = {rank: sorted(wave for holder, wave in times if holder == rank) for rank in range(plan.ranks)}
    while any(todo.values()):
        lowest = min(waves[0] for waves in todo.values() if waves)
        if plan.mode == "waves":
            clock = [max(clock)] * plan.ranks
        ready = [
            places
            for rank, waves in todo.items()
            if waves and (plan.mode == "free" or waves[0] == lowest)
            for places in [partners[rank, waves[0]]]
            if all(todo[other] and todo[other][0] == wave for other, wave in places)
        ]
        for together in {frozenset(each) for each in ready}:
            end = max(clock[rank] for rank, _ in together) + max(times[place] for place in together)
            for rank, _ in together:
                clock[rank] = end
                todo[rank].pop(0)
    return clock


def best_makespan(lengths: list[int], mesh: Mesh, cost: CostModel) -> int:
    """No plan ends earlier: every way to give every document any set of ranks (of sizes whose pieces fit), its heaviest
    rank if nobody ever waited, all of a rank's compute hid all of its traffic, and its tokens filled its micro-batches.
    For a few documents."""
    rings = [
        [
            ring
            for size in range(1, mesh.ranks + 1)
            for ring in combinations(range(mesh.ranks), size)
            if all(
                sum(stop - start for start, stop in piece_ranges(length, size, i)) <= mesh.capacity for i in range(size)
            )
        ]
        for length in lengths
    ]
    return min(max(_rank_times(lengths, choice, mesh, cost)) for choice in product(*rings))


def _rank_times(lengths: list[int], choice: tuple[tuple[int, ...], ...], mesh: Mesh, cost: CostModel) -> list[int]:
    tokens, attention, traffic = ([0] * mesh.ranks for _ in range(3))
    for length, ring in zip(lengths, choice, strict=True):
        row = cost.row_far if len({rank // mesh.node for rank in ring}) > 1 else cost.row_near
        for index, rank in enumerate(ring):
            (a, b), (c, d) = piece_ranges(length, len(ring), index)
            own = {*range(a, b), *range(c, d)}
            tokens[rank] += len(own)
            attention[rank] += cost.quadratic * sum(query + 1 for query in own)
            traffic[rank] += row * (max(own, default=-1) + 1 - len(own))
    return [
        cost.fixed * -(-held // mesh.capacity) + cost.linear * held + max(compute, rows)
        for held, compute, rows in zip(tokens, attention, traffic, strict=True)
    ]
