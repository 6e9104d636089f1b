"""`seqmesh bench loader`: tokens from shards to torch tensors, beside roofs of the machine and loaders of others.

Ranks are processes of their own, which `rank.py` runs; several of them share one loader process. Every way of reading
takes whole passes over the same set, so tokens per CPU-second compare: of all processes, and of the ranks alone, which
is what a training process pays; wall time is there, too. Candidates are `readings.USES`. Peers are measured in
turns with the loader and the roofs, in processes of their own (see `peers_reading`); slow ones are given an eighth of
the documents. A quick run measures a few of them in one way, unless others are asked for.

    trainer_rate                 million tokens per CPU-second of the ranks: packs of 131,072 and 1,048,576 tokens, and
                                 2 and 4 ranks of one machine
    total_rate, total_rate_full  the same of rank and loader process, for tokens alone and with labels and positions
    trainer_rate_copy_vs_copy    rank's CPU: batches that are copies, beside copies of as many bytes
    gather_vs_roof               the loader's gather beside one memcpy for each document, shuffled
    ..._vs_best_peer             beside the fastest peer that is installed; ..._vs_best_peer_process: that reads in a
                                 process of its own

Rows give the rest: `first_batch`, `resume`, CPU of planning and of the loader process, memory of the loader process.
What a training step waits for the loader is `data_share` of `seqmesh bench train`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seqmesh.benchmarks.harness import (
    Ratio,
    Results,
    Row,
    Spread,
    absent,
    chosen_peers,
    count_ratio,
    interleave,
    ratio,
    row,
)
from seqmesh.benchmarks.lengths import python_documents
from seqmesh.benchmarks.peers_loading import RIVALS
from seqmesh.benchmarks.peers_reading import RATE, TOTAL, TRAINER, absent_rows, peer_rows, prepared
from seqmesh.benchmarks.rank_jobs import EQUAL, FIRST, GATHER, INLINE, PLAN, RAW, RESUME, RankProcess
from seqmesh.benchmarks.readings import (
    ALL_CPU,
    BESIDE_PEERS,
    CAPACITY,
    COPIES,
    FULL,
    LOADER,
    RANK_CPU,
    SECONDS,
    TOKENS_ONLY,
    USES,
    Reading,
    Use,
    job_of,
    rate_row,
    readers,
    settings_of,
)
from seqmesh.benchmarks.shards import random_shards, scratch_folder
from seqmesh.packer.lengths import Int64Array

PEERS = tuple(RIVALS)
QUICK_PEERS = ("torch", "spdl")
VOCABULARY = 1 << 17  # ids of 32 bits, as in the loader's batches
LARGE = 1 << 20  # tokens of a large pack

Shape = tuple[int, int]  # ranks, tokens of a pack
SHAPES: dict[Shape, tuple[str, ...]] = {
    (1, CAPACITY): tuple(USES),
    (1, LARGE): (RAW, EQUAL, GATHER, LOADER, COPIES, FULL),
    (2, CAPACITY): (LOADER,),
    (4, CAPACITY): (LOADER,),
}
LOADER_CPU, PLANNER_CPU = "loader CPU", "planner CPU"
CPU_ROWS = {LOADER_CPU: LOADER, PLANNER_CPU: PLAN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. variants: numbers of workers of each peer, from the highest. positions: that are
    resumed from. starts: first batches."""

    tokens: int
    repeats: int
    peer_repeats: int
    variants: int
    positions: int
    starts: int


QUICK = Scale(tokens=1 << 25, repeats=3, peer_repeats=1, variants=1, positions=9, starts=1)
WHOLE = Scale(tokens=350_000_000, repeats=5, peer_repeats=2, variants=2, positions=33, starts=5)


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """A set that is large enough for steady figures."""
    peers = chosen_peers(PEERS, against)
    if quick and not against:
        peers = QUICK_PEERS
    return measure_set(QUICK if quick else WHOLE, peers)


def measure_set(scale: Scale, peers: tuple[str, ...]) -> Results:
    """Write a set and read it in every shape, then beside peers."""
    results = Results()
    lengths = python_documents(scale.tokens, CAPACITY)
    with scratch_folder(8 * scale.tokens) as scratch, ExitStack() as stack:
        folder = random_shards(scratch / "set", lengths, vocab_size=VOCABULARY)
        ranks = [stack.enter_context(RankProcess()) for _ in range(max(count for count, _ in SHAPES))]
        for count, pack in SHAPES:
            results += reading(folder, ranks[:count], pack, scale)
        results += starting(folder, scale.starts) + resuming(folder, ranks[0], scale.positions)
        return results + beside_peers(folder, lengths, ranks[0], scale, peers)


def reading(folder: Path, ranks: list[RankProcess], pack: int, scale: Scale) -> Results:
    """Every way of reading the set in one shape."""
    names = SHAPES[len(ranks), pack]
    with ExitStack() as stack:
        candidates = readers(names, folder, ranks, pack, scale.tokens, stack)
        readings = interleave(candidates, scale.repeats)
    case = case_name(len(ranks), pack)
    rows = {kind: {name: rate_row(f"{case}, {kind}", name, kind, readings[name]) for name in names} for kind in SECONDS}
    every = [each for by_name in rows.values() for each in by_name.values()]
    extra = [cpu_row(case, kind, name, readings[name]) for kind, name in CPU_ROWS.items() if name in readings]
    memory = list(memory_rows(case, readings[LOADER]))
    return Results(rows=(*every, *extra, *memory), ratios=tuple(figures(rows, len(ranks))))


def case_name(ranks: int, pack: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}, packs of {pack}"


def cpu_row(case: str, kind: str, name: str, readings: list[Reading]) -> Row:
    """CPU milliseconds for a million tokens."""
    seconds = [(each.rank_cpu if kind == PLANNER_CPU else each.loader_cpu) / each.tokens for each in readings]
    return row(f"{case}, {kind}", name, Spread.of(seconds).scaled(1e9), "CPU-ms/Mtok")


def memory_rows(case: str, readings: list[Reading]) -> Iterator[Row]:
    """Memory of the loader process at the end of each reading; none where the kernel does not say."""
    if memory := readings[-1].megabytes:
        anonymous = Spread.of([each.megabytes["anonymous"] for each in readings])
        yield row(f"{case}, loader memory", LOADER, anonymous, "MB, anonymous", **memory)


def figures(rows: dict[str, dict[str, Row]], ranks: int) -> Iterator[Ratio]:
    """The figures of one shape."""
    cpu, rank = rows[ALL_CPU], rows[RANK_CPU]
    yield rate("trainer_rate", rank[LOADER])
    if ranks == 1:
        yield rate("total_rate", cpu[LOADER])
        yield rate("total_rate_full", cpu[FULL])
        yield ratio("trainer_rate_copy_vs_copy", rank[COPIES], rank[EQUAL])
        yield ratio("gather_vs_roof", rank[GATHER], rank[RAW])
    if INLINE in rank:
        yield ratio("inline_vs_roof", rank[INLINE], rank[RAW])


def rate(figure: str, of: Row) -> Ratio:
    """Million tokens per second as a figure of its own."""
    return count_ratio(figure, of, "tokens", "microseconds")


def starting(folder: Path, starts: int) -> Results:
    """The first batch of a loader that starts, in fresh processes that have imported it; the loader process imports
    what it needs meanwhile, and that counts."""
    use = replace(USES[LOADER], way=FIRST)
    job = job_of(use, settings_of(use, folder, 1, CAPACITY))
    cpu, wall = [], []
    for _ in range(starts):
        with RankProcess() as rank:
            rank.ask(job)
            taken = rank.answer()
        cpu.append(taken.cpu + taken.children)
        wall.append(taken.end - taken.begin)
    return Results(
        rows=(
            row("first_batch, CPU", LOADER, Spread.of(cpu), "CPU-s"),
            row("first_batch, wall", LOADER, Spread.of(wall), "s"),
        )
    )


def resuming(folder: Path, rank: RankProcess, positions: int) -> Results:
    """From `load_state_dict` to the first batch, planned and assembled, at drawn positions."""
    use = Use(way=RESUME, settings=TOKENS_ONLY)
    job = job_of(use, settings_of(use, folder, 1, CAPACITY))
    found = []
    for seed in range(positions + 1):
        rank.ask(replace(job, seed=seed))
        taken = rank.answer()
        found.append(1e3 * (taken.end - taken.begin))
    return Results(rows=(row("resume", INLINE, Spread.of(found[1:]), "ms", positions=positions),))


def beside_peers(folder: Path, lengths: Int64Array, rank: RankProcess, scale: Scale, names: tuple[str, ...]) -> Results:
    """Peers in turns with the loader and the roofs, all of them on packs of CAPACITY tokens."""
    case = "beside peers"
    with scratch_folder(24 * scale.tokens) as scratch, ExitStack() as stack:
        peers = prepared(names, folder, lengths, scratch, CAPACITY, scale.variants)
        ours = readers(BESIDE_PEERS, folder, [rank], CAPACITY, scale.tokens, stack)
        theirs = {candidate: peer.read for candidate, peer in peers.items()}
        readings: dict[str, list[Any]] = interleave({**ours, **theirs}, scale.peer_repeats, warm_up=False)
    found = [
        rate_row(f"{case}, {kind}", name, of, readings[name])
        for kind, of in ((TOTAL, ALL_CPU), (TRAINER, RANK_CPU))
        for name in ours
    ]
    for candidate, peer in peers.items():
        found += peer_rows(case, peer, readings[candidate])
    present = {peer.name for peer in peers.values()}
    found += [each for name in names if name not in present for each in absent_rows(case, name)]
    return Results(rows=tuple(found)) + best_peers(case, found)


def best_peers(case: str, rows: list[Row]) -> Results:
    """Ours over the fastest peer, of all processes and of the trainer alone; and over the fastest that reads in a
    process of its own, as ours does."""
    found = []
    for kind in (TOTAL, TRAINER):
        of_kind = [each for each in rows if each.case == f"{case}, {kind}"]
        (own,) = [each for each in of_kind if each.candidate == LOADER]
        for name, least in (("peer", 0), ("peer_process", 1)):
            peers = [each for each in of_kind if each.counts.get("workers", -1) >= least]
            best = max(
                peers, key=lambda each: each.value or 0.0, default=absent(f"{case}, {kind}", f"best {name}", RATE)
            )
            found.append(ratio(f"{kind}_rate_vs_best_{name}", own, best))
    return Results(ratios=tuple(found))
