"""`seqmesh bench ledger`: what the ledger and the metrics cost a loader, beside serving.

Serving is everything but the sockets: planning, gathering, the message's header, the counters. All is CPU time of this
process, over the same steps. The ledger is measured twice: alone, over steps that were planned before; and while they
are served, call by call, where the gathering in between has swept the caches and what waits keeps memory from being
used again. Of the metrics it is the counting, which goes on whether anybody asks or not, and what it takes to answer
every 15 seconds.

    ledger_share             recording a step, beside serving it
    ledger_share_in_service  the same, in between
    metrics_share            counting a step's batches and its part of an answer, beside serving it
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
from seqmesh.loader.metrics import LoaderCollector
from seqmesh.loader.planner import Step
from seqmesh.loader.reader import Reader
from seqmesh.loader.recorder import Recorder
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
    tokens, repeats = (1 << 25, 3) if quick else (1 << 26, 9)
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
    size, batches = _size(feed, planned, folder), sum(int(step.plan.waves.sum()) for step in planned)
    spreads = measure(
        {
            "serving": lambda: _serve(Feed(settings), steps),
            "ledger": lambda: _record(Recorder(folder, feed), planned),
            "ledger, in service": lambda: _record_in_service(Feed(settings), folder, steps),
            "counting": partial(_count, feed, planned),
            "answering": partial(_answer, _count_all(feed, planned)),
        },
        repeats,
    )
    for file in folder.iterdir():
        file.unlink()
    counts = {"documents": sum(len(step.documents.document) for step in planned) // steps, "batches": batches // steps}
    serving = _row(case, "serving", spreads["serving"], steps, **counts)
    recording = _row(case, "ledger", spreads["ledger"], steps, bytes=size // steps)
    in_service = _row(case, "ledger, in service", spreads["ledger, in service"], steps)
    metrics = _row(case, "metrics", _sum(spreads, SCRAPE_SECONDS), steps)
    ratios = (
        ratio("ledger_share", recording, serving),
        ratio("ledger_share_in_service", in_service, serving),
        ratio("metrics_share", metrics, serving),
    )
    return Results(rows=(serving, recording, in_service, metrics), ratios=ratios)


def _row(case: str, name: str, spread: Spread, steps: int, **counts: int) -> Row:
    return row(case, name, spread.scaled(1e6 / steps), UNIT, **counts)


def _sum(spreads: dict[str, Spread], every: float) -> Spread:
    """Counting, and as many answers as there are in the time that serving takes."""
    answers = spreads["answering"].scaled(spreads["serving"].median / every)
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


def _record(recorder: Recorder, planned: list[Step]) -> float:
    """CPU seconds of recording the steps, for all ranks."""
    ranks = len(planned[0].plan.waves)
    begin = time.process_time()
    for step in planned:
        for rank in range(ranks):
            recorder.begin(step, (rank, 0))
    recorder.close()
    return time.process_time() - begin


class _Timed(Recorder):
    """Sums up the seconds that it takes. Those of the clock are in it; CPU time would take a system call."""

    seconds = 0.0
    _inside = False

    def begin(self, step: Step, place: tuple[int, int], *, anew: bool = True, continued: bool = False) -> None:
        begin, self._inside = time.perf_counter(), True
        super().begin(step, place, anew=anew, continued=continued)
        self._inside = False
        self.seconds += time.perf_counter() - begin

    def flush(self) -> None:
        begin = time.perf_counter()
        super().flush()
        if not self._inside:
            self.seconds += time.perf_counter() - begin


def _record_in_service(feed: Feed, folder: Path, steps: int) -> float:
    """Seconds in the recorder while steps are served."""
    recorder = _Timed(folder, feed)
    _serve(feed, steps, recorder)
    recorder.close()
    return recorder.seconds


def _size(feed: Feed, planned: list[Step], folder: Path) -> int:
    """Bytes written for the steps."""
    recorder = Recorder(folder, feed)
    _record(recorder, planned)
    return recorder.path.stat().st_size


def _count_all(feed: Feed, planned: list[Step]) -> Counters:
    counters = Counters()
    _count(feed, planned, counters)
    return counters


def _count(feed: Feed, planned: list[Step], counters: Counters | None = None) -> None:
    """What `Feed` and `Supply` count of these steps."""
    counters = counters or Counters()
    for step in planned:
        begin = time.perf_counter()
        so_far = served(step.after, feed.sources.names)
        counters.note_planned(step.before.step, step.plan.tokens, time.perf_counter() - begin, so_far)
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
