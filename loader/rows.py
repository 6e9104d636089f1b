"""Batching `rows`: a window of documents from the stream, packed into rows of one capacity, a fixed number a step.

A window holds the next so many documents, and is packed by `packer.rows`; its steps are the global batches. It is
planned again wherever a state lies inside it, from the state at its start. A full window is cut to whole steps: the
documents that would leave one incomplete begin the next window. A short one, at the end of an epoch, is padded with
empty rows, or the documents of its last, incomplete step are dropped: which, is drawn anew in each epoch. Nothing here
depends on the number of ranks but `spread`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.sources import Sources
from seqmesh.loader.state import SourceState, StreamState
from seqmesh.loader.stream import Draw, begin, take
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.permute import mix64, permutation, shuffle_key
from seqmesh.packer.plan import Assignment, StepPlan, make_plan
from seqmesh.packer.rows import EMPTY, Rows, plan_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """begun: the stream's state at its start, with the shares that are in effect in it; after: at its end, but for the
    count of steps. documents: in the order of the stream; those of each row are numbers of these."""

    begun: StreamState
    after: StreamState
    documents: Draw
    rows: Rows

    def state(self, step: int) -> StreamState:
        """The stream's state before a step of the window, or after its last."""
        number = self.begun.step + step
        if step == self.rows.steps:
            return replace(self.after, step=number)
        return replace(self.begun, step=number, window_step=step)

    def check_step(self, step: int) -> None:
        """Raises ValueError where it has no such step."""
        if step >= self.rows.steps:
            raise ValueError(
                f"window_step is {step}: the window has {self.rows.steps} steps; was it of other settings?"
            )

    def step(self, step: int) -> tuple[Draw, Int64Array]:
        """The documents of a step, row by row, and the row of each. Raises ValueError where it has no such step."""
        self.check_step(step)
        held = [self.rows.pieces(step, row) for row in range(self.rows.row_at.shape[1])]
        row = np.repeat(np.arange(len(held)), [len(pieces) for pieces in held])
        return self.documents.of(np.concatenate(held)), row


WindowAt = Callable[[StreamState], Window | None]


def window_start(state: StreamState, settings: LoaderSettings, sources: Sources) -> StreamState | None:
    """The state at the start of the window that a state lies in: with the shares that are in effect there, whatever
    the settings say by now. None at the end."""
    if state.window_step == 0:
        return begin(state, settings, sources)
    return replace(state, step=state.step - state.window_step, window_step=0)


def plan_window(begun: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources) -> Window | None:
    """The window that begins at a state that `window_start` gave, or the one after it where all of it is dropped; None
    at the end. Raises as `stream.draw` does."""
    found: StreamState | None = begun
    while found is not None:
        window = _planned(found, lengths, settings, sources)
        if window.rows.steps:
            return window
        found = begin(window.after, settings, sources)
    return None


def spread(lengths: Int64Array, row: Int64Array, settings: LoaderSettings, *, supervised_tokens: int) -> StepPlan:
    """The plan of a step: rows in order, equally many for each rank, each a micro-batch of its own, also where it is
    empty. row [D]: of each document."""
    assert settings.rows_per_step is not None
    each = settings.rows_per_step // settings.ranks
    count = len(lengths)
    assignment = Assignment(
        rings=np.ones(count, np.int64),
        document=np.arange(count),
        index=np.zeros(count, np.int64),
        rank=row // each,
        wave=row % each,
    )
    cost = settings.cost or CostModel()
    plan = make_plan(lengths, assignment, settings.mesh, cost, supervised_tokens=supervised_tokens)
    return replace(plan, waves=np.full(settings.ranks, each))


def _planned(begun: StreamState, lengths: Int64Array, settings: LoaderSettings, sources: Sources) -> Window:
    most = settings.documents_per_window
    documents, after = take(begun, lengths, settings, sources, most)
    rows = _pack(documents, begun, settings)
    if (rows.row_at == EMPTY).any():
        sure = (rows.steps - 1) * rows.row_at.shape[1]  # as many documents as rows surely leave no row empty
        if len(documents.length) == most:
            documents, after = take(begun, lengths, settings, sources, sure)
            rows = _pack(documents, begun, settings)
        elif settings.tail == "drop":
            documents, after = _drop_all_but(sure, documents, begun, after)
            rows = _pack(documents, begun, settings)
        else:
            rows = replace(rows, row_at=_whole_steps_first(rows.row_at))
    return Window(begun=begun, after=after, documents=documents, rows=rows)


def _pack(documents: Draw, begun: StreamState, settings: LoaderSettings) -> Rows:
    assert settings.rows_per_step is not None
    return plan_rows(
        documents.length,
        settings.capacity,
        settings.rows_per_step,
        cost=settings.cost,
        seed=begun.seed,
        epoch=begun.epoch,
        window=begun.step,
    )


def _whole_steps_first(row_at: Int64Array) -> Int64Array:
    return row_at[np.argsort((row_at == EMPTY).any(axis=1), kind="stable")]


def _drop_all_but(count: int, documents: Draw, begun: StreamState, after: StreamState) -> tuple[Draw, StreamState]:
    """A drawn choice of the documents, in their order, and the state with the others counted as dropped."""
    key = mix64(shuffle_key(begun.seed, begun.epoch) ^ begun.step)
    chosen, left_out = np.split(permutation(len(documents.length), key), [count])
    lost = documents.of(left_out)
    sources = []
    for number, source in enumerate(after.sources):
        of_it = lost.length[lost.source == number]
        sources.append(_without(source, len(of_it), int(of_it.sum())))
    return documents.of(np.sort(chosen)), replace(after, sources=tuple(sources))


def _without(source: SourceState, documents: int, tokens: int) -> SourceState:
    return replace(
        source, tokens=source.tokens - tokens, since=source.since - tokens, dropped=source.dropped + documents
    )
