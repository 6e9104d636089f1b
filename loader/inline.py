"""`Source`: where a rank's batches come from, and `Inline`, the one without a loader process."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Protocol

from seqmesh.loader.feed import Delivery, Draft, Feed, Position
from seqmesh.loader.ledger.recorder import Recorder
from seqmesh.loader.steps import count_steps
from seqmesh.loader.stream import StreamState


class Source(Protocol):
    """Where a rank's batches come from."""

    def subscribe(self, position: Position) -> None: ...
    def next(self) -> Delivery | None: ...
    def count_steps(self, state: StreamState) -> int: ...
    def close(self) -> None: ...


class Inline:
    """Batches read in this process: for tests, debugging and single-process use."""

    def __init__(self, feed: Feed, rank: int, ledger: str | None = None) -> None:
        """ledger: see `ServeOptions`. Raises OSError where it can not be written."""
        self._feed = feed
        self._rank = rank
        self._position = Position(feed.start)
        self._recorder = None if ledger is None else Recorder(Path(ledger), feed)
        self._step = -1  # that was last recorded since `subscribe`
        if self._recorder:
            weakref.finalize(self, self._recorder.close)  # whoever does not close it keeps its ledger

    def subscribe(self, position: Position) -> None:
        self._position, self._step = position, -1

    def next(self) -> Delivery | None:
        draft = self._feed.draft(self._rank, self._position)
        if draft is None:
            return None
        if self._recorder and draft.step.before.step != self._step:
            self._record(self._recorder, draft)
        self._position = draft.next_position
        return Delivery(draft.fill(), draft.next_position)

    def count_steps(self, state: StreamState) -> int:
        return count_steps(state, self._feed.shards.lengths, self._feed.settings, self._feed.sources)

    def close(self) -> None:
        self._feed.shards.close()
        if self._recorder:
            self._recorder.close()

    def _record(self, recorder: Recorder, draft: Draft) -> None:
        self._step = draft.step.before.step
        recorder.begin(draft.step, (self._rank, 0), anew=draft.is_first)
        if recorder.due <= time.monotonic():
            recorder.flush()
