"""From a position in the stream to the plan of one step: the global batch first, then the packer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """One optimizer step: its documents, their plan, and the stream's state before and after it. scalars: what every
    batch of the step says of it."""

    before: StreamState
    after: StreamState
    documents: Draw
    plan: StepPlan
    digest: str  # of the plan
    scalars: dict[str, int | float | str]


Learned = Callable[[Draw], Int64Array]  # supervised tokens of each document or piece of one [D]


def next_step(
    state: StreamState,
    lengths: Int64Array,
    learned: Learned,
    settings: LoaderSettings,
    sources: Sources | None = None,
    *,
    window_at: WindowAt | None = None,
) -> Step | None:
    """The step that begins at `state`, or None at the end of the last epoch.

    lengths [N]: of all documents of the set. sources: by default one. window_at: a `plan_window` that remembers. Every
    machine that calls this gets the same step. Raises what `draw` and `learned` raise.
    """
    sources = sources or one_source(len(lengths))
    if settings.batching == "rows":
        at = window_at or (lambda begun: plan_window(begun, lengths, settings, sources))
        return _step_of_rows(state, learned, settings, sources, at)
    drawn = draw(state, lengths, settings, sources)
    if drawn is None:
        return None
    documents, after = drawn
    cost = settings.cost or CostModel()
    return make_step(
        state, after, documents, plan_step(documents.length, settings.mesh, cost, supervised=learned(documents))
    )


def _step_of_rows(
    state: StreamState, learned: Learned, settings: LoaderSettings, sources: Sources, window_at: WindowAt
) -> Step | None:
    begun = window_start(state, settings, sources)
    window = window_at(begun) if begun is not None else None
    if window is None:
        return None
    documents, row = window.step(state.window_step)
    plan = spread(documents.length, row, settings, supervised_tokens=int(learned(documents).sum()))
    return make_step(state, window.state(state.window_step + 1), documents, plan)


def make_step(before: StreamState, after: StreamState, documents: Draw, plan: StepPlan) -> Step:
    """The step of a plan, whoever made that, with what batches say of it."""
    digest = plan.digest()
    scalars: dict[str, int | float | str] = {
        "step": before.step,
        "epoch": before.epoch,
        "tokens_in_step": plan.tokens,
        "supervised_tokens_in_step": plan.supervised_tokens,
        "rings_in_step": plan.rings,
        "imbalance": plan.imbalance,
        "plan": digest,
    }
    return Step(before=before, after=after, documents=documents, plan=plan, digest=digest, scalars=scalars)
