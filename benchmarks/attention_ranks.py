"""What ranks exchange for attention, in time and in bytes, and what it does to the results.

Real ranks (gloo), one thread each, run forward and backward of one layer over real documents: by the planner's rings,
in both ways of exchanging keys, and with every document over all ranks, as static context parallelism has it. The time
is that of the slowest rank; there are more ranks than cores, so it says less than the bytes. Those are counted as they
are sent, and held against the formula that the planner uses: a difference is an error, not a figure.

Results of rings of all sizes are compared with those of the same document on one rank, in the same dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import TypeAdapter

from seqmesh.benchmarks.attention_cases import HEADS, WIDTH
from seqmesh.benchmarks.attention_errors import error_row
from seqmesh.benchmarks.harness import Ratio, Results, Row, Spread, ratio, row
from seqmesh.benchmarks.lengths import published_documents
from seqmesh.benchmarks.planner_cases import H800
from seqmesh.benchmarks.ranks import ask_ranks
from seqmesh.benchmarks.rings import WINDOW, halo_rows
from seqmesh.packer.cost import MODEL_8B
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import largest_document, rows_sent
from seqmesh.packer.plan import Mesh, StepPlan

MODULE = "seqmesh.benchmarks.attention_rank"
RING, GATHER, STATIC, LONG, HALO = "rings", "rings, gathered", "static", "long", f"long, window {WINDOW}"
# Keys and values forward and again backward, and their gradients, at four bytes each.
ROW_BYTES = 3 * 2 * HEADS * WIDTH * 4
FILL = 0.9  # of what the ranks hold
SEED = 21  # draws documents of which some are spread, on two ranks as on four


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """One micro-batch of all ranks. rings: (length, ranks) of documents that are spread, in order. whole [R]: lengths
    of the documents that each rank holds."""

    rings: tuple[tuple[int, tuple[int, ...]], ...]
    whole: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What ranks are asked to time: attention over all waves."""

    name: str
    waves: tuple[Wave, ...]
    exchange: str = "ring"
    window: int | None = None

    @property
    def rows(self) -> int:
        """Of keys and values, which ranks send each other in one attention."""
        spread = [ring for wave in self.waves for ring in wave.rings]
        lengths, sizes = np.array([n for n, _ in spread], np.int64), np.array([len(m) for _, m in spread], np.int64)
        return int(rows_sent(lengths, sizes).sum()) if self.window is None else halo_rows(lengths, sizes, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What ranks are asked. compared: tokens of a document that is spread over every number of ranks, in order to
    compare; none where it is 0."""

    turns: tuple[Turn, ...]
    repeats: int
    compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """seconds: of the slowest rank, of every repeat of every turn. sent: bytes of all ranks in one turn. errors: of
    output and gradients, by dtype and what is compared."""

    seconds: dict[str, list[float]]
    sent: dict[str, int]
    errors: dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """timed: numbers of ranks. compared_ranks: of the one that compares `compared` tokens. capacity: tokens of a rank.
    long: tokens of the document with a window."""

    timed: tuple[int, ...]
    compared_ranks: int
    compared: int
    capacity: int
    long: int
    repeats: int


QUICK = Size(timed=(2,), compared_ranks=2, compared=515, capacity=1_024, long=4_096, repeats=3)
FULL = Size(timed=(2, 4), compared_ranks=8, compared=1_021, capacity=4_096, long=4_096, repeats=5)


def exchanges(*, quick: bool) -> Results:
    """Ask the ranks, for each number of them."""
    size = QUICK if quick else FULL
    results = Results()
    for ranks in sorted({*size.timed, size.compared_ranks}):
        job = Job(
            turns=turns(ranks, size) if ranks in size.timed else (),
            repeats=size.repeats,
            compared=size.compared if ranks == size.compared_ranks else 0,
        )
        answer = TypeAdapter(Answer).validate_json(ask_ranks(MODULE, asdict(job), ranks))
        results += timings(f"exchange, {ranks} ranks", job, answer) + comparisons(job, answer)
    return results


def turns(ranks: int, size: Size) -> tuple[Turn, ...]:
    """Real documents in three ways, and one long document with a window and without."""
    tokens = int(FILL * ranks * size.capacity)
    lengths = published_documents("wikipedia", tokens, largest_document(ranks, size.capacity), seed=SEED)
    rings = planned(lengths, ranks, size.capacity)
    long = (over_all([size.long], ranks),)
    return (
        Turn(name=RING, waves=rings),
        Turn(name=GATHER, waves=rings, exchange="gather"),
        Turn(name=STATIC, waves=(over_all(lengths.tolist(), ranks),)),
        Turn(name=LONG, waves=long),
        Turn(name=HALO, waves=long, exchange="auto", window=WINDOW),
    )


def over_all(lengths: Sequence[int], ranks: int) -> Wave:
    """Every document over all ranks."""
    return Wave(rings=tuple((n, tuple(range(ranks))) for n in lengths), whole=((),) * ranks)


def planned(lengths: Int64Array, ranks: int, capacity: int) -> tuple[Wave, ...]:
    """The waves of the planner, as for the model and the machine of the other counts (`rings`)."""
    plan = plan_step(lengths, Mesh(ranks=ranks, capacity=capacity, mode="waves"), MODEL_8B.cost_model(H800))
    return tuple(_wave(plan, wave) for wave in range(int(plan.waves.max())))


def _wave(plan: StepPlan, wave: int) -> Wave:
    """Ranks meet rings from the largest on, and by document."""
    held = [plan.pieces(rank, wave) for rank in range(plan.ranks)]
    alone = [pieces[plan.ring_size[pieces] == 1] for pieces in held]
    everything = np.concatenate(held)
    spread = everything[plan.ring_size[everything] > 1]
    order = sorted({(-int(plan.ring_size[piece]), int(plan.document[piece])) for piece in spread})
    return Wave(
        rings=tuple((int(plan.lengths[document]), _members(plan, document)) for _, document in order),
        whole=tuple(tuple(plan.lengths[plan.document[pieces]].tolist()) for pieces in alone),
    )


def _members(plan: StepPlan, document: int) -> tuple[int, ...]:
    first, last = plan.ring_offsets[document : document + 2]
    return tuple(plan.ring_ranks[first:last].tolist())


def timings(case: str, job: Job, answer: Answer) -> Results:
    """Every turn's time and bytes, and those of the planner's rings beside the others."""
    found = {each.name: _timed(case, each, answer) for each in job.turns}
    if not found:
        return Results()
    ratios = (
        ratio("static_vs_rings", found[STATIC], found[RING]),
        ratio("gather_vs_ring", found[GATHER], found[RING]),
        ratio("halo_time_vs_ring", found[HALO], found[LONG]),
        _bytes_ratio("ring_bytes_vs_static", found[RING], found[STATIC]),
        _bytes_ratio("halo_vs_ring", found[HALO], found[LONG]),
    )
    return Results(rows=tuple(found.values()), ratios=ratios)


def _timed(case: str, turn: Turn, answer: Answer) -> Row:
    """Raises RuntimeError where ranks sent more or fewer bytes than the planner thinks."""
    sent, expected = answer.sent[turn.name], turn.rows * ROW_BYTES
    if sent != expected:
        raise RuntimeError(f"{case}, {turn.name}: {sent} bytes were sent, {expected} are those of {turn.rows} rows")
    counts = {"bytes": sent, "rings": sum(len(wave.rings) for wave in turn.waves), "waves": len(turn.waves)}
    return row(case, turn.name, Spread.of(answer.seconds[turn.name]).scaled(1e3), "ms", **counts)


def _bytes_ratio(figure: str, numerator: Row, denominator: Row) -> Ratio:
    value = numerator.counts["bytes"] / denominator.counts["bytes"]
    return Ratio(
        figure=figure, value=value, numerator=f"{numerator.name}:bytes", denominator=f"{denominator.name}:bytes"
    )


def comparisons(job: Job, answer: Answer) -> Results:
    """One row for each dtype and ring."""
    rows = [
        error_row(f"ring error of {job.compared} tokens, {dtype}", name, counts)
        for dtype, found in answer.errors.items()
        for name, counts in found.items()
    ]
    return Results(rows=tuple(rows))
