"""How long a step takes where each rank is a pipeline of stages, and how long it must take at least.

Every rank runs its micro-batches by the 1F1B schedule: stage s does min(S − s, n) forwards, then one backward and one
forward in turn, then the backwards that are left. A micro-batch of time t (the sum of its pieces' costs) takes t / 3S
forward and 2t / 3S backward on each of S stages, so t alone in an empty pipeline. Passing it on from stage to stage is
taken to cost nothing, and stages to be equal. Which micro-batches there are is decided elsewhere, see `levels`.
"""

from __future__ import annotations

import numpy as np

from seqmesh.packer.cost import CostModel
from seqmesh.packer.jit import jit
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.makespan import lower_bound, micro_batches

PARTS = 3  # of a micro-batch's time: one is forward, two are backward


def pipelined(
    *,
    ranks: int,
    stages: int,
    rank: Int64Array,
    wave: Int64Array,
    document: Int64Array,
    ring_size: Int64Array,
    costs: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """When the first stage begins and ends with the micro-batch of each piece of a plan [P], by event simulation.

    Pieces are sorted by rank, then wave. Micro-batches that are connected through rings pass through each stage, in
    each direction, together: they begin there when the last of them is ready and keep pace with the dearest. A number
    that a rank leaves out before its last micro-batch is an empty one that takes no time, but its turn. Begins are
    rounded down and ends up. Raises ValueError where the costs are too large for exact sums.

    No two ranks can wait for each other, however many micro-batches each has and whatever rings there are: number the
    forward of micro-batch w on stage s by w · 2 + s, its backward by w · 2 + 2S − 1 − s. On one stage all numbers
    differ, and they go up in the order of 1F1B: of F(w) and B(v) the forward comes first where w < v + S − s, which
    knows neither the rank nor its number of micro-batches. What an operation waits for has a smaller number: the one
    before it on its stage, and the same micro-batch one stage up (s − 1 forward, s + 1 backward) or, for the first
    backward, its forward. Members of a ring share (w, s, direction), and so the number. Whatever has the smallest
    number of all that is left to do can therefore begin; and to go through the numbers in order is to simulate.
    """
    if PARTS * stages * int(costs.sum()) > 1 << 62:
        raise ValueError(f"costs of {int(costs.sum())} are too large for {stages} stages: use a coarser unit")
    batches = micro_batches(rank=rank, wave=wave, document=document, ring_size=ring_size, costs=costs)
    first, order = batches.first, batches.order
    counts = np.zeros(ranks, np.int64)
    np.maximum.at(counts, rank, wave + 1)
    offsets = np.searchsorted(wave[first][order], np.arange(counts.max(initial=0) + 1))
    begins, ends = np.empty((2, len(first)), np.int64)
    _run(stages, counts, offsets, order, rank[first], batches.group, batches.times, begins, ends)
    unit = PARTS * stages
    return (begins // unit)[batches.of_piece], -(-ends // unit)[batches.of_piece]


@jit
def _run(
    stages: int,
    counts: Int64Array,
    offsets: Int64Array,
    order: Int64Array,
    rank: Int64Array,
    group: Int64Array,
    times: Int64Array,
    begins: Int64Array,
    ends: Int64Array,
) -> None:
    """Fill when the first stage begins and ends with each micro-batch, in units of 1 / 3S of the costs'.

    counts [ranks]: micro-batches of each rank. `order` sorts them by wave and group; those of wave w are
    order[offsets[w]:offsets[w + 1]].
    """
    waves, last = len(offsets) - 1, stages - 1
    clock = np.zeros((stages, len(counts)), np.int64)
    done = np.zeros((2, stages + 1, len(counts)), np.int64)  # what stage s passed on last, forward and backward
    begin = np.empty(len(counts), np.int64)
    for number in range(2 * (waves + last)):
        for stage in range(stages):
            backward = (number - stage) % 2
            wave = (number - stage - backward * (2 * (last - stage) + 1)) // 2
            if wave < 0 or wave >= waves:
                continue
            mine = order[offsets[wave] : offsets[wave + 1]]
            source = done[1, stage + 1] if backward else done[0, stage - 1]
            begin[:] = np.where(counts > wave, np.maximum(clock[stage], source), clock[stage])
            clock[stage] = begin
            _go_together(mine, rank, group, times, 1 + backward, begin, clock[stage])
            done[backward, stage] = clock[stage]
            if stage == 0:
                for batch in mine:
                    if backward:
                        ends[batch] = clock[0, rank[batch]]
                    else:
                        begins[batch] = begin[rank[batch]]


@jit
def _go_together(
    mine: Int64Array,
    rank: Int64Array,
    group: Int64Array,
    times: Int64Array,
    parts: int,
    begin: Int64Array,
    clock: Int64Array,
) -> None:
    """One operation of the micro-batches of one wave, sorted by group: a group begins together and ends together."""
    at = 0
    while at < len(mine):
        last, ready, longest = at, 0, 0
        while last < len(mine) and group[mine[last]] == group[mine[at]]:
            ready, longest = max(ready, begin[rank[mine[last]]]), max(longest, times[mine[last]])
            last += 1
        for batch in mine[at:last]:
            begin[rank[batch]] = ready
            clock[rank[batch]] = ready + parts * longest
        at = last


def pipeline_bound(
    lengths: Int64Array, ranks: int, capacity: int, cost: CostModel, stages: int, *, per_node: int
) -> int:
    """No plan is faster under `pipelined`, whatever rings and micro-batches it uses.

    Take the rank with the most work, at least the mean of all, W (with the fixed costs of as few micro-batches as hold
    all tokens). Its last stage can begin no sooner than its first micro-batch that is not empty has passed the S − 1
    stages before, each of which takes a third of its time over S. It then has W / S to do, and ends with a backward,
    which S − 1 stages repeat at two thirds. Both micro-batches hold at least one piece, and a ring keeps pace with its
    dearest member: so each takes `least` or more, the fixed cost and the cheapest document spread over all ranks. In
    sum (W + (S − 1) · least) / S. And the longest document takes all its time from its first forward to its last
    backward, on the best ring there is for it.
    """
    if len(lengths) == 0:
        return 0
    costs = cost.of(lengths)
    work = int(costs.sum()) + cost.fixed * -(-int(lengths.sum()) // capacity)
    least = cost.fixed - (-int(costs.min()) // ranks)
    even = -(-(work + ranks * (stages - 1) * least) // (ranks * stages))
    longest = lengths[np.argmax(lengths)][np.newaxis]
    return max(even, lower_bound(longest, ranks, capacity, cost, per_node=per_node, barrier=False))
