"""From a position in the stream to the plan of one step: the global batch first, then the packer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqmesh.loader.rows import WindowAt, plan_window, spread, window_start
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.sources import Sources, one_source
from seqmesh.loader.stream import Draw, StreamState, draw
from seqmesh.packer.cost import CostModel
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step: its documents, their plan, and the stream's state before and after it."""

    before: StreamState
    after: StreamState
    documents: Draw
    plan: StepPlan
    digest: str  # of the plan


def next_step(
    state: StreamState,
    lengths: Int64Array,
    supervised: Int64Array,
    settings: LoaderSettings,
    sources: Sources | None = None,
    *,
    window_at: WindowAt | None = None,
) -> Step | None:
    """The step that begins at `state`, or None at the end of the last epoch.

    lengths, supervised [N]: of all documents of the set. sources: by default one. window_at: a `plan_window` that
    remembers. Every machine that calls this gets the same step.
    """
    sources = sources or one_source(len(lengths))
    if settings.batching == "rows":
        at = window_at or (lambda begun: plan_window(begun, lengths, settings, sources))
        return _step_of_rows(state, lengths, supervised, settings, sources, at)
    drawn = draw(state, lengths, settings, sources)
    if drawn is None:
        return None
    documents, after = drawn
    learned = learned_tokens(documents, lengths, supervised)
    plan = plan_step(documents.length, settings.mesh, settings.cost or CostModel(), supervised=learned)
    return Step(before=state, after=after, documents=documents, plan=plan, digest=plan.digest())


def learned_tokens(documents: Draw, lengths: Int64Array, supervised: Int64Array) -> Int64Array:
    """Supervised tokens of each document or piece of one [D]."""
    whole = documents.length == lengths[documents.document]
    # A piece is a document of its own: its last token has no label, whatever follows it in the shard.
    return np.where(whole, supervised[documents.document], np.maximum(documents.length - 1, 0))


def _step_of_rows(
    state: StreamState,
    lengths: Int64Array,
    supervised: Int64Array,
    settings: LoaderSettings,
    sources: Sources,
    window_at: WindowAt,
) -> Step | None:
    begun = window_start(state, settings, sources)
    window = window_at(begun) if begun is not None else None
    if window is None:
        return None
    documents, row = window.step(state.window_step)
    learned = int(learned_tokens(documents, lengths, supervised).sum())
    plan = spread(documents.length, row, settings, supervised_tokens=learned)
    after = window.state(state.window_step + 1)
    return Step(before=state, after=after, documents=documents, plan=plan, digest=plan.digest())
