"""`seqmesh bench ledger`: what the ledger and the metrics cost a loader, beside serving.

Serving is everything but the sockets: planning, gathering, the message's header, the counters; CPU time. The ledger's
part is timed call by call while steps are served, since the gathering in between sweeps the caches: over the same steps
alone it would take about half. Of the metrics it is the counting, which goes on whether anybody asks or not, in a
loop of its own, where it costs less than in between, and what it takes to answer every 15 seconds.

    ledger_share    recording a step, beside serving it
    metrics_share   counting a step's batches and its part of an answer, beside serving it
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from seqmesh.benchmarks.harness import Results, Row, Spread, chosen_peers, measure, ratio, row
from seqmesh.benchmarks.lengths import python_documents
from seqmesh.benchmarks.shards import random_shards, scratch_folder
from seqmesh.loader.counters import Counters
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.ledger.recorder import Recorder
from seqmesh.loader.metrics import LoaderCollector
from seqmesh.loader.planner import Step
from seqmesh.loader.reader import Reader
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import served
from seqmesh.loader.supply import Supply

PEERS: tuple[str, ...] = ()
LONGEST = 1 << 17
CASES: dict[str, dict[str, Any]] = {
    "131,072 tokens": {"tokens_per_step": 1 << 17, "capacity": LONGEST},
    "131,072 tokens, 4 ranks": {"tokens_per_step": 1 << 17, "capacity": 1 << 15, "max_document": LONGEST, "ranks": 4},
    "1,048,576 tokens": {"tokens_per_step": 1 << 20, "capacity": LONGEST},
}
NO_LIMIT = 1 << 62
SCRAPE_SECONDS = 15  # between two, as Prometheus is mostly set
UNIT = "µs/step"


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Write documents of real lengths and serve them."""
    chosen_peers(PEERS, against)
    tokens, repeats = (1 << 26, 3) if quick else (1 << 27, 7)
    results = Results()
    with scratch_folder(4 * tokens) as scratch:
        random_shards(scratch / "set", python_documents(tokens, LONGEST))
        for case, changes in CASES.items():
            settings = LoaderSettings(data=str(scratch / "set"), vocab_size=1 << 16, seed=0, **changes)
            steps = tokens // changes["tokens_per_step"]
            results += compare(case, settings, scratch / "ledger", steps=steps, repeats=repeats)
    return results


def compare(case: str, settings: LoaderSettings, folder: Path, *, steps: int, repeats: int) -> Results:
    """Serve the first steps, count them, and record them in files in `folder`, which are removed. Raises ValueError
    where there are fewer steps."""
    feed = Feed(settings)
    planned = _first_steps(feed, steps)
    spreads = measure(
        {
            "serving": lambda: _serve(Feed(settings), steps),
            "ledger": lambda: _record(Feed(settings), folder, steps),
            "counting": lambda: _count(feed, planned, Counters()),
            "answering": partial(_answer, _counted(feed, planned)),
        },
        repeats,
    )
    sizes = [file.stat().st_size for file in folder.iterdir()]
    for file in folder.iterdir():
        file.unlink()
    documents = sum(len(step.documents.document) for step in planned)
    batches = sum(int(step.plan.waves.sum()) for step in planned)
    serving = _row(
        case, "serving", spreads["serving"], steps, documents=documents // steps, batches=round(batches / steps)
    )
    recording = _row(case, "ledger", spreads["ledger"], steps, bytes=max(sizes) // steps)
    metrics = _row(case, "metrics", _metrics(spreads), steps)
    ratios = ratio("ledger_share", recording, serving), ratio("metrics_share", metrics, serving)
    return Results(rows=(serving, recording, metrics), ratios=ratios)


def _row(case: str, name: str, spread: Spread, steps: int, **counts: int) -> Row:
    return row(case, name, spread.scaled(1e6 / steps), UNIT, **counts)


def _metrics(spreads: dict[str, Spread]) -> Spread:
    """Counting, and as many answers as are due in the time that serving takes."""
    answers = spreads["answering"].scaled(spreads["serving"].median / SCRAPE_SECONDS)
    counting = spreads["counting"]
    return Spread(
        median=counting.median + answers.median, low=counting.low + answers.low, high=counting.high + answers.high
    )


def _first_steps(feed: Feed, steps: int) -> list[Step]:
    found, state = list[Step](), feed.start
    for _ in range(steps):
        if (step := feed.step(state)) is None:
            raise ValueError(f"the data have {len(found)} steps: {steps} are to be measured")
        found.append(step)
        state = step.after
    return found


def _serve(feed: Feed, steps: int, recorder: Recorder | None = None) -> float:
    """CPU seconds of serving all ranks, step by step."""
    supply = Supply(feed, poison=False, recorder=recorder)
    begin = time.process_time()
    for _ in _served_steps(supply, feed, steps):
        if recorder and recorder.due <= time.monotonic():
            recorder.flush()
    return time.process_time() - begin


def _served_steps(supply: Supply, feed: Feed, steps: int) -> Iterator[int]:
    """Every batch of every rank, acknowledged at once; after each step its number."""
    place: dict[str, Any] = {"peer": 0, "peers": 1, "position": Position(feed.start), "limit": NO_LIMIT}
    readers = [Reader(identity=b"", client="", rank=rank, **place) for rank in range(feed.settings.ranks)]
    for step in range(steps):
        for reader in readers:
            while reader.position.state.step == step and supply.next_batch(reader, ()) is not None:
                supply.note_delivered(reader, reader.sequence)
                supply.take_back(reader, reader.let_go(reader.sequence))
        yield step


class _Timed(Recorder):
    """Sums up the seconds that it takes. CPU time would take a system call each time."""

    seconds = 0.0
    _flushing = 0.0  # of these, since the last beginning

    def begin(self, step: Step, place: tuple[int, int], *, anew: bool = True, continued: bool = False) -> None:
        begin, self._flushing = time.perf_counter(), 0.0
        Recorder.begin(self, step, place, anew=anew, continued=continued)
        self.seconds += time.perf_counter() - begin - self._flushing

    def flush(self) -> None:
        begin = time.perf_counter()
        super().flush()
        self._flushing = time.perf_counter() - begin
        self.seconds += self._flushing


def _record(feed: Feed, folder: Path, steps: int) -> float:
    """Seconds in the recorder while steps are served."""
    recorder = _Timed(folder, feed)
    _serve(feed, steps, recorder)
    recorder.close()
    return recorder.seconds


def _counted(feed: Feed, planned: list[Step]) -> Counters:
    counters = Counters()
    _count(feed, planned, counters)
    return counters


def _count(feed: Feed, planned: list[Step], counters: Counters) -> None:
    """What `Feed` and `Supply` count of these steps."""
    for step in planned:
        begin = time.perf_counter()
        so_far = partial(served, step.after, feed.sources.names)
        tokens = int(step.scalars["tokens_in_step"])
        counters.note_planned(step.before.step, tokens, time.perf_counter() - begin, so_far)
        for rank, waves in enumerate(step.plan.waves.tolist()):
            for _ in range(waves):
                _count_batch(counters, rank, LONGEST, 4 * LONGEST)


def _count_batch(counters: Counters, rank: int, tokens: int, size: int) -> None:
    """Gathered, sent, delivered and let go of."""
    begin = time.perf_counter()
    counters.read_seconds += time.perf_counter() - begin
    counters.read_batches += 1
    counters.read_tokens += tokens
    counters.read_bytes += size
    sent = counters.ranks[rank]
    sent.sent += 1
    sent.sent_bytes += size
    sent.under_way_bytes += size
    delivered = counters.ranks[rank]
    delivered.delivered += 1
    delivered.delivered_tokens += tokens
    counters.ranks[rank].under_way_bytes -= size


def _answer(counters: Counters) -> None:
    """One answer to somebody who asks, but for the connection."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LoaderCollector(counters))
    generate_latest(registry)
