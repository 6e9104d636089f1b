"""A rank of `seqmesh bench attention`: runs attention of documents that are spread over ranks, times and compares it.

`torchrun ... -m seqmesh.benchmarks.attention_rank JOB OUT` reads a `Job` as JSON; the first rank writes an `Answer`.
All ranks begin each turn together, and the slowest one counts. To compare, every rank computes the whole document, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from seqmesh.benchmarks.asked import answer
from seqmesh.benchmarks.attention_cases import Attend, dtype_name, forward_backward, ours, random_rows
from seqmesh.benchmarks.attention_errors import NAMES, relative_error
from seqmesh.benchmarks.attention_ranks import Answer, Job, Turn, Wave, over_all
from seqmesh.benchmarks.calibrate_rank import piece_positions, timed
from seqmesh.benchmarks.harness import interleave
from seqmesh.kernels.attention import varlen_attention
from seqmesh.kernels.layout import Layout, Ring
from seqmesh.packer.pieces import chunk_sizes, piece_tokens
from seqmesh.trainer.parallel import Ranks

COMPARED = ("ring", "gather")
DTYPES = (torch.float32, torch.float64)


def measure(job: Job, ranks: Ranks) -> Answer:
    """Everything that the job asks for, round by round; the first round is not counted."""
    seconds, sent = time_turns(job.turns, job.repeats, ranks)
    errors = {dtype_name(dtype): compare(job.compared, dtype, ranks) for dtype in DTYPES} if job.compared else {}
    return Answer(seconds=seconds, sent=sent, errors=errors)


def time_turns(turns: Sequence[Turn], repeats: int, ranks: Ranks) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of the slowest rank in every round, and bytes that all ranks send in one."""
    layouts = {each.name: [layout_on(wave, ranks.rank) for wave in each.waves] for each in turns}
    taken = interleave({each.name: partial(timed, run_of(each, layouts[each.name]), ranks) for each in turns}, repeats)
    seconds = {name: _over_ranks(torch.tensor(own), dist.ReduceOp.MAX).tolist() for name, own in taken.items()}
    own = {name: sum(layout.traffic.sent for layout in each) // (repeats + 1) for name, each in layouts.items()}
    return seconds, {name: int(_over_ranks(torch.tensor(count), dist.ReduceOp.SUM)) for name, count in own.items()}


def layout_on(wave: Wave, rank: int) -> Layout:
    """The rank's pieces, in the order of rings, then its whole documents."""
    rings = [(length, members) for length, members in wave.rings if rank in members]
    pieces = [piece_tokens(length, len(members), members.index(rank)) for length, members in rings]
    sizes = [*pieces, *wave.whole[rank]]
    bounds = list(accumulate(sizes, initial=0))
    described = [
        Ring(
            segment=i,
            start=bounds[i],
            ranks=members,
            index=members.index(rank),
            chunks=chunk_sizes(length, len(members)),
        )
        for i, (length, members) in enumerate(rings)
    ]
    return Layout(torch.tensor(bounds, dtype=torch.int32), max(sizes, default=0), tuple(described))


def run_of(turn: Turn, layouts: Sequence[Layout]) -> Callable[[], None]:
    """Forward and backward of all waves in which this rank has anything."""
    waves = [
        (_attend(layout, turn.exchange, turn.window), random_rows(int(layout.cu_seqlens[-1]), torch.float32))
        for layout in layouts
        if int(layout.cu_seqlens[-1])
    ]

    def run() -> None:
        for attend, rows in waves:
            forward_backward(attend, rows)

    return run


def _attend(layout: Layout, exchange: str, window: int | None = None) -> Attend:
    return lambda q, k, v: varlen_attention(q, k, v, layout, window=window, exchange=exchange)


def compare(length: int, dtype: torch.dtype, ranks: Ranks) -> dict[str, dict[str, float]]:
    """A document over 2 to all ranks, in both ways of exchanging keys, beside the same on one: the largest errors."""
    rows = random_rows(length, dtype)
    whole = forward_backward(ours((length,)), rows)
    return {
        f"{exchange}, {size} ranks": _errors(rows, whole, exchange, ranks, size)
        for exchange in COMPARED
        for size in range(2, ranks.count + 1)
    }


def _errors(
    rows: Sequence[Tensor], whole: Sequence[Tensor], exchange: str, ranks: Ranks, size: int
) -> dict[str, float]:
    """A rank that is not in the ring has no error, and nothing to compute."""
    own = torch.zeros(len(NAMES), dtype=torch.float64)
    if ranks.rank < size:
        layout = layout_on(over_all([len(rows[0])], size), ranks.rank)
        held = piece_positions(len(rows[0]), Ranks(ranks.rank, size, ranks.device))
        mine = [x.detach()[held].requires_grad_() for x in rows[:3]] + [rows[3][held]]
        got = forward_backward(_attend(layout, exchange), mine)
        for i, (piece, right) in enumerate(zip(got, whole, strict=True)):
            own[i] = relative_error(piece, right[held], right)
    return dict(zip(NAMES, _over_ranks(own, dist.ReduceOp.MAX).tolist(), strict=True))


def _over_ranks(own: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    dist.all_reduce(own, operation)
    return own


if __name__ == "__main__":
    answer(Job, measure)
