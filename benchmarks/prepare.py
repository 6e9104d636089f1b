"""`seqmesh bench prepare`: from JSONL to trusted shards, beside bare engines and the tools of others.

Whole processes over this machine's Python files, in turns, CPU seconds of all that each starts; a tokenizer with the
split of Llama 3, trained on them. Every run's ids are compared with every other's, marks included. What a run takes
however little it is given (imports, the proof of the engine, workers) is told apart by running twice, over the corpus
and several times the corpus, or half of it and all: what lies between the two is the steady rate. A bare engine has its
texts in memory and makes calls as large; both have one core, and one thread, for each worker. A quick run has 5 MB
instead of 20, one round, one worker, and of the peers only datatrove unless others are asked for.

    prepare_vs_datatrove        CPU seconds of datatrove, whole processes over the corpus, beside ours, by engine;
    prepare_vs_datatrove_steady beside ours, of both the steady rate
    prepare_vs_datasets[_steady] the same, of `map` of datasets with the library tokenizers
    prepare_vs_bare             steady tokens per CPU-second, beside the bare engine's
    prepare_vs_two_bare         two workers, steady tokens per second on the wall beside two bare engines at once;
                                ..._cpu: per CPU-second
    prepare_memory              bytes of all processes over long input beside short, two workers: 1 where it is flat
    verify_vs_copy              bytes of a set verified per CPU-second, beside copying them in memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from seqmesh.benchmarks.bare_engine import Bare
from seqmesh.benchmarks.harness import (
    Ratio,
    Results,
    Row,
    Spread,
    absent,
    chosen_peers,
    installed_version,
    interleave,
    measure,
    ratio,
    row,
)
from seqmesh.benchmarks.peers_preparing import DATASETS, DATATROVE
from seqmesh.benchmarks.preparing import Ground, Made, prepare, prepare_bare, prepare_peer, version_of
from seqmesh.benchmarks.shards import random_shards, scratch_folder
from seqmesh.tools.verify import verify_set

PEERS = (DATATROVE, DATASETS)
QUICKTOK = "quicktok"
ENGINES = {QUICKTOK: 10, "tiktoken": 3, "tokenizers": 1}  # each with the times of the corpus that its longer runs get
PACKAGES = {QUICKTOK: "quicktok-v1"}
WHOLE, STEADY, BARE, MEMORY, VERIFY = "whole process", "steady", "bare engine", "memory", "verify"
CPU, RATE, WALL_RATE = "CPU-s", "Mtok/CPU-s", "Mtok/s"
DOCUMENT = 1_000  # tokens of those that are verified


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """corpus: bytes. vocabulary: of the tokenizer. long: times the corpus, for memory. verified: bytes."""

    corpus: int
    vocabulary: int
    workers: tuple[int, ...]
    repeats: int
    long: int
    verified: int


QUICK = Sizes(corpus=5_000_000, vocabulary=8_192, workers=(1,), repeats=1, long=4, verified=1 << 27)
FULL = Sizes(corpus=20_000_000, vocabulary=32_768, workers=(1, 2), repeats=3, long=10, verified=1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A candidate's two runs of one round, over less and over more: what lies between them is steady. whole: the one of
    them that was over the corpus."""

    less: Made
    more: Made
    whole: Made

    def rate(self, clock: str) -> float:
        """Million tokens a second of this clock, `cpu` or `wall`."""
        seconds = float(getattr(self.more.spent, clock) - getattr(self.less.spent, clock))
        return (self.more.tokens - self.less.tokens) / 1e6 / max(seconds, 1e-9)

    @property
    def start(self) -> float:
        """CPU seconds that a run over nothing would take."""
        return max(0.0, self.less.spent.cpu - self.less.tokens / 1e6 / self.rate("cpu"))


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Measure on a corpus made here. Raises RuntimeError where candidates do not make the same ids."""
    peers = chosen_peers(PEERS, against or (PEERS[:1] if quick else PEERS))
    sizes = QUICK if quick else FULL
    with scratch_folder(40 * sizes.corpus + 3 * sizes.verified) as scratch:
        ground = Ground.prepared(scratch, size=sizes.corpus, vocabulary=sizes.vocabulary)
        return compare(ground, sizes, peers) + memory(ground, sizes.long) + verification(scratch, sizes)


def compare(ground: Ground, sizes: Sizes, peers: tuple[str, ...]) -> Results:
    """All candidates in turns, the bare engines among them."""
    engines = [engine for engine in ENGINES if installed_version(PACKAGES.get(engine, engine))]
    ours = [(engine, workers) for engine in engines for workers in sizes.workers]
    calls: dict[str, Callable[[], Any]] = {}
    for engine, workers in ours:
        calls[_name(engine, workers)] = partial(_pair, ground, partial(prepare, engine=engine, workers=workers), engine)
        calls[f"{BARE} {_name(engine, workers)}"] = partial(prepare_bare, ground, ground.corpus, engine, workers)
    for peer in filter(version_of, peers):
        calls[peer] = partial(_pair, ground, partial(prepare_peer, peer=peer), peer)
    found = interleave(calls, sizes.repeats, warm_up=False)
    _check(found)
    rows = _peer_rows(found, peers)
    results = Results(rows=tuple(rows.values()))
    for engine, workers in ours:
        results += _ours(found, engine, workers, rows)
    return results


def _name(engine: str, workers: int) -> str:
    return f"{engine}, {workers} worker{'' if workers == 1 else 's'}"


def _pair(ground: Ground, make: Callable[..., Made], candidate: str) -> Pair:
    """A fast engine gets the corpus and a multiple of it, others half of the corpus and all of it."""
    times = ENGINES.get(candidate, 1)
    if times == 1:
        return Pair(less=make(ground, ground.half), more=(whole := make(ground, ground.corpus)), whole=whole)
    return Pair(less=(whole := make(ground, ground.corpus)), more=make(ground, ground.repeated(times)), whole=whole)


def _check(found: dict[str, list[Any]]) -> None:
    """All made the same of the corpus, and as many tokens are the same tokens everywhere else."""
    runs = [run for runs in found.values() for run in runs]
    made = [run.whole if isinstance(run, Pair) else run for run in runs]
    longer = {(each.tokens, each.checksum) for run in runs if isinstance(run, Pair) for each in (run.less, run.more)}
    sums = {each.checksum for each in made if each.checksum}  # of two bare workers neither has all
    if len(sums) > 1 or len(dict(longer)) < len(longer):
        raise RuntimeError(f"candidates made different ids of the same texts: {', '.join(found)}")


def _peer_rows(found: dict[str, list[Any]], peers: tuple[str, ...]) -> dict[str, Row]:
    """By case and peer."""
    rows: dict[str, Row] = {}
    for peer in peers:
        pairs: list[Pair] = found.get(peer, [])
        if not pairs:
            rows[WHOLE + peer], rows[STEADY + peer] = absent(WHOLE, peer, CPU), absent(STEADY, peer, RATE)
            continue
        rows[WHOLE + peer] = replace(_whole(peer, pairs), note=f"{peer} {version_of(peer)}")
        rows[STEADY + peer] = _steady(peer, pairs)
    return rows


def _whole(candidate: str, pairs: list[Pair]) -> Row:
    spread = Spread.of([pair.whole.spent.cpu for pair in pairs])
    return row(WHOLE, candidate, spread, CPU, tokens=pairs[0].whole.tokens)


def _steady(candidate: str, pairs: list[Pair]) -> Row:
    start = Spread.of([pair.start for pair in pairs]).median
    spread = Spread.of([pair.rate("cpu") for pair in pairs])
    return row(STEADY, candidate, spread, RATE, tokens=pairs[0].more.tokens - pairs[0].less.tokens, start_s=start)


def _ours(found: dict[str, list[Any]], engine: str, workers: int, peers: dict[str, Row]) -> Results:
    name = _name(engine, workers)
    pairs: list[Pair] = found[name]
    bare: list[Bare] = found[f"{BARE} {name}"]
    whole, steady = _whole(name, pairs), _steady(name, pairs)
    roof = row(BARE, name, Spread.of([each.tokens / 1e6 / each.cpu for each in bare]), RATE, tokens=bare[0].tokens)
    if workers > 1:
        wall = row(f"{STEADY}, wall", name, Spread.of([pair.rate("wall") for pair in pairs]), WALL_RATE)
        wall_roof = row(f"{BARE}, wall", name, Spread.of([each.tokens / 1e6 / each.wall for each in bare]), WALL_RATE)
        figures = ratio("prepare_vs_two_bare", wall, wall_roof), ratio("prepare_vs_two_bare_cpu", steady, roof)
        return Results(rows=(whole, steady, roof, wall, wall_roof), ratios=figures)
    return Results(
        rows=(whole, steady, roof), ratios=(ratio("prepare_vs_bare", steady, roof), *_beside(whole, steady, peers))
    )


def _beside(whole: Row, steady: Row, peers: dict[str, Row]) -> tuple[Ratio, ...]:
    """Our one worker beside the peers, above 1 where ours takes less."""
    found = [ratio(f"prepare_vs_{row.candidate}", row, whole) for row in peers.values() if row.case == WHOLE]
    steadies = [row for row in peers.values() if row.case == STEADY]
    return (*found, *(ratio(f"prepare_vs_{row.candidate}_steady", steady, row) for row in steadies))


def memory(ground: Ground, times: int) -> Results:
    """Two workers, the fastest engine, over the corpus and over many times of it."""
    engine = next(engine for engine in ENGINES if installed_version(PACKAGES.get(engine, engine)))
    short, long = (_memory_row(ground, engine, corpus) for corpus in (ground.corpus, ground.repeated(times)))
    return Results(rows=(short, long), ratios=(ratio("prepare_memory", long, short),))


def _memory_row(ground: Ground, engine: str, corpus: Path) -> Row:
    made = prepare(ground, corpus, engine, 2, watch=True)
    name = f"{_name(engine, 2)}, {corpus.stat().st_size / 1e6:.0f} MB"
    return row(MEMORY, name, Spread.of([made.spent.peak / 1e6]), "MB", tokens=made.tokens)


def verification(scratch: Path, sizes: Sizes) -> Results:
    """In this process, all of its threads; the copy is of the set's files, in memory that has been used."""
    documents = np.full(sizes.verified // (4 * DOCUMENT), DOCUMENT, np.int64)
    folder = random_shards(scratch / "verified", documents, vocab_size=1 << 17)
    source = np.concatenate([np.fromfile(path, np.uint8) for path in sorted(folder.iterdir()) if path.is_file()])
    target = np.zeros_like(source)

    def verified() -> None:
        if problems := verify_set(folder):
            raise RuntimeError(f"a set that was just written is not whole: {problems[0].what}")

    spreads = measure({VERIFY: verified, "copy": lambda: np.copyto(target, source)}, max(3, sizes.repeats))
    rows = [row(VERIFY, name, spread.rate(len(source) / 1e9), "GB/CPU-s") for name, spread in spreads.items()]
    return Results(rows=tuple(rows), ratios=(ratio("verify_vs_copy", *rows),))
