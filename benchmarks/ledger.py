"""What the ledger costs a loader: CPU of recording a step, beside that of serving it.

Serving is everything but the sockets: planning, gathering, the message's header. Both are of this process, over the
same steps; the least of several turns counts, since all else that runs only adds to it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.planner import Step
from seqmesh.loader.reader import Reader
from seqmesh.loader.recorder import Recorder
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.supply import Supply

NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCost:
    """serving, recording: CPU seconds a step. documents, size: of a step, bytes in the ledger; on average."""

    serving: float
    recording: float
    documents: float
    size: float

    @property
    def share(self) -> float:
        return self.recording / self.serving


def ledger_cost(settings: LoaderSettings, folder: Path, *, steps: int, turns: int = 5) -> LedgerCost:
    """Serve the first steps, and record them in files in `folder`. Raises ValueError where there are fewer steps."""
    feed = Feed(settings)
    planned = _first_steps(feed, steps)
    serving = min(_served(Feed(settings), steps) for _ in range(turns))
    recorded = [_recorded(feed, planned, folder) for _ in range(turns)]
    return LedgerCost(
        serving=serving / steps,
        recording=min(seconds for seconds, _ in recorded) / steps,
        documents=sum(len(step.documents.document) for step in planned) / steps,
        size=recorded[0][1] / steps,
    )


def _first_steps(feed: Feed, steps: int) -> list[Step]:
    found, state = list[Step](), feed.start
    for _ in range(steps):
        if (step := feed.step(state)) is None:
            raise ValueError(f"the data have {len(found)} steps: {steps} are to be measured")
        found.append(step)
        state = step.after
    return found


def _served(feed: Feed, steps: int) -> float:
    """CPU seconds of serving all ranks, step by step."""
    supply = Supply(feed, poison=False)
    place: dict[str, Any] = {"peer": 0, "peers": 1, "position": Position(feed.start), "limit": NO_LIMIT}
    readers = [Reader(identity=b"", client="", rank=rank, **place) for rank in range(feed.settings.ranks)]
    begin = time.process_time()
    for step in range(steps):
        for reader in readers:
            while reader.position.state.step == step and supply.next_batch(reader, ()) is not None:
                supply.note_delivered(reader, reader.sequence)
                supply.take_back(reader, reader.let_go(reader.sequence))
    return time.process_time() - begin


def _recorded(feed: Feed, planned: list[Step], folder: Path) -> tuple[float, int]:
    """CPU seconds of recording the steps, for all ranks, and bytes written."""
    recorder = Recorder(folder, feed)
    begin = time.process_time()
    for step in planned:
        for rank in range(feed.settings.ranks):
            recorder.begin(step, (rank, 0))
    recorder.close()
    seconds, size = time.process_time() - begin, recorder.path.stat().st_size
    recorder.path.unlink()
    return seconds, size
