"""From a position in the stream to the plan of one step: the global batch first, then the packer."""

from __future__ import annotations

from dataclasses import dataclass

from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.stream import Draw, StreamState, draw
from seqmesh.loader.supervised import supervised_counts
from seqmesh.packer.cost import CostModel
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


def next_step(state: StreamState, shards: ShardSet, settings: LoaderSettings) -> Step | None:
    """The step that begins at `state`, or None at the end of the last epoch. Every machine that calls this gets the
    same step. Reads no token. Raises ShardError where the spans of a document that is cut are damaged."""
    drawn = draw(state, shards.lengths, settings)
    if drawn is None:
        return None
    documents, after = drawn
    learned = supervised_counts(shards, documents.document, documents.offset, documents.length)
    plan = plan_step(documents.length, settings.mesh, settings.cost or CostModel(), supervised=learned)
    digest = plan.digest()
    scalars: dict[str, int | float | str] = {
        "step": state.step,
        "epoch": state.epoch,
        "tokens_in_step": plan.tokens,
        "supervised_tokens_in_step": plan.supervised_tokens,
        "rings_in_step": plan.rings,
        "imbalance": plan.imbalance,
        "plan": digest,
    }
    return Step(before=state, after=after, documents=documents, plan=plan, digest=digest, scalars=scalars)
