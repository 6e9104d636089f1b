"""`Feed`: any rank's batches from any position, in this process. Both the loader process and `mode="inline"` use it.

A position is a stream state and a wave. Since planning is a pure function of the state, serving needs no memory of
what was served: a rank that resumes, reconnects or lags behind simply names its position. A few steps are remembered
so that the ranks of one machine share a plan.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from seqmesh.loader.ahead import needed_at_once, upcoming
from seqmesh.loader.batch import NumpyBatch, Outline, fill, outline, write
from seqmesh.loader.counters import Counters
from seqmesh.loader.fitness import check_documents
from seqmesh.loader.gather import DOCUMENT
from seqmesh.loader.mixture import SHARES
from seqmesh.loader.planner import Step, next_step
from seqmesh.loader.rows import Window, plan_window
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.sources import one_source, sources_by_code
from seqmesh.loader.storage.cache import Cache
from seqmesh.loader.stream import Draw, StreamState, served, start_state
from seqmesh.loader.supervised import supervised_counts
from seqmesh.packer.lengths import Int64Array

REMEMBERED_STEPS = 4
REMEMBERED_WINDOWS = 2
EXPECT_SECONDS = 0.25  # between two looks at which parts of a set will be needed

log = logging.getLogger("seqmesh.loader")


@dataclass(frozen=True, slots=True)
class Position:
    """The next micro-batch of a rank: number `wave` of its step that begins at `state`."""

    state: StreamState
    wave: int = 0

    def following(self, after: StreamState | None) -> Position:
        """Where the rank goes on. after: the state after the step, where this is its last micro-batch; else None."""
        return Position(self.state, self.wave + 1) if after is None else Position(after)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch, and where the rank goes on."""

    batch: NumpyBatch
    next_position: Position


@dataclass(frozen=True, slots=True)
class Draft:
    """A batch of a rank that is decided and not gathered yet: its outline, which tells the memory it needs, the step
    that it is of, and where the rank goes on."""

    rank: int
    outline: Outline
    next_position: Position
    shards: ShardSet
    step: Step

    @property
    def is_first(self) -> bool:
        """Whether it is the rank's first of the step."""
        return self.outline.scalars["wave"] == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the block that the batch fills."""
        return self.outline.nbytes

    @property
    def tokens(self) -> int:
        return int(self.outline.scalars["tokens"])

    @property
    def is_ready(self) -> bool:
        """Whether it can be gathered at once. If not, what is missing is being fetched. Raises what `fill` raises."""
        return self.shards.ready(self.outline.segments[DOCUMENT])

    def fill(self, block: npt.NDArray[np.uint8] | None = None) -> NumpyBatch:
        """Gather the batch, see `batch.fill`. May be called again: for another block, say."""
        return fill(self.shards, self.outline, block)

    def write(self, block: npt.NDArray[np.uint8]) -> None:
        """Gather the batch into a block, for somebody else to read."""
        write(self.shards, self.outline, block)


class Feed:
    """Opens the data and serves it. Raises what `ShardSet` and `check_documents` raise. settings: with a seed and an
    absolute folder, see `LoaderSettings.resolved`. counters: where steps that are planned are counted."""

    def __init__(self, settings: LoaderSettings, counters: Counters | None = None, cache: Cache | None = None) -> None:
        settings.check_mesh()
        self.counters = counters or Counters()
        self.settings = settings = settings.resolved()
        self.shards = ShardSet(settings.data, reading=settings.reading, cache=cache)
        if settings.verify:
            self.shards.check_checksums()
        lengths = self.shards.lengths
        mixed = settings.mixture is not None
        self.sources = (
            sources_by_code(self.shards.source_codes(), self.shards.sources, self.shards.part_first, self.shards.usable)
            if mixed
            else one_source(len(lengths), self.shards.part_first, self.shards.usable)
        )
        check_documents(lengths, settings, self.sources)
        self._check_room()
        self._expected = 0.0  # when it was last said which parts will be needed
        self._steps: OrderedDict[StreamState, Step | None] = OrderedDict()

        @lru_cache(maxsize=REMEMBERED_WINDOWS)
        def window_at(begun: StreamState) -> Window | None:
            return plan_window(begun, lengths, settings, self.sources)

        self._window_at = window_at

    def _check_room(self) -> None:
        """Raises ValueError where parts of the set would have to be fetched again and again."""
        if self.shards.arrivals is None:
            return
        limit = self.shards.arrivals.store.limit
        kept = np.array([part.kept for part in self.shards.catalog.parts], np.int64)
        needed = needed_at_once(self.settings, self.sources, kept)
        if needed > limit:
            raise ValueError(
                f"cache_bytes is {limit}: {self.settings.data} needs {needed} for copies of what is read at a "
                "time; raise it, or shuffle fewer files at a time (shuffle: {window: N})"
            )

    def _expect(self, state: StreamState) -> None:
        """Say which parts will be needed from a state on, now and then: it costs as much as drawing a step."""
        if (arrivals := self.shards.arrivals) is None:
            return
        arrivals.forecast = partial(upcoming, state, self.shards.lengths, self.settings, self.sources)
        if time.monotonic() - self._expected >= EXPECT_SECONDS:
            arrivals.expect(arrivals.forecast())
            self._expected = time.monotonic()

    def _learned(self, drawn: Draw) -> Int64Array:
        return supervised_counts(self.shards, drawn.document, drawn.offset, drawn.length)

    @property
    def start(self) -> StreamState:
        assert self.settings.seed is not None
        return start_state(self.settings.seed, len(self.sources))

    @property
    def data_fingerprint(self) -> str:
        """Which data this is, wherever it lies."""
        return self.shards.fingerprint

    def step(self, state: StreamState) -> Step | None:
        """The step that begins at `state`; None at the end."""
        if state not in self._steps:
            self._steps[state] = self._plan(state)
            if len(self._steps) > REMEMBERED_STEPS:
                self._steps.popitem(last=False)
        return self._steps[state]

    def _plan(self, state: StreamState) -> Step | None:
        begin = time.perf_counter()
        step = next_step(
            state, self.shards.lengths, self._learned, self.settings, self.sources, window_at=self._window_at
        )
        if step is not None:
            seconds, so_far = time.perf_counter() - begin, partial(served, step.after, self.sources.names)
            self.counters.note_planned(state.step, int(step.scalars["tokens_in_step"]), seconds, so_far)
            self._note_shares(step)
        return step

    def _note_shares(self, step: Step) -> None:
        """Say so where other weights are in effect from a step on."""
        before, after = ([source.share for source in state.sources] for state in (step.before, step.after))
        if self.settings.mixture is not None and before != after:
            names = self.sources.names
            parts = ", ".join(f"{name} {share / SHARES:.4g}" for name, share in zip(names, after, strict=True))
            log.info(
                "from step %d on: %s; tokens served before: %s", step.before.step, parts, served(step.before, names)
            )

    def deliver(self, rank: int, position: Position) -> Delivery | None:
        """The batch at a position; None at the end of the last epoch. Raises what `draft` raises, and ShardError for a
        damaged shard."""
        draft = self.draft(rank, position)
        return Delivery(draft.fill(), draft.next_position) if draft else None

    def draft(self, rank: int, position: Position) -> Draft | None:
        """What `deliver` would give, before it is gathered. Raises ValueError for a rank or wave that the plan does not
        have."""
        if not 0 <= rank < self.settings.ranks:
            raise ValueError(f"rank is {rank}: this loader serves ranks 0 to {self.settings.ranks - 1}")
        step = self.step(position.state)
        if step is None:
            return None
        self._expect(position.state)
        waves = max(int(step.plan.waves[rank]), 1)
        if position.wave >= waves:
            raise ValueError(f"wave is {position.wave}: rank {rank} has {waves} in step {position.state.step}")
        following = self.step(step.after)
        next_plan = following.digest if following else ""
        drawn = outline(step, rank, position.wave, self.settings, next_plan=next_plan)
        after = step.after if position.wave + 1 == waves else None
        return Draft(rank, drawn, position.following(after), self.shards, step)
