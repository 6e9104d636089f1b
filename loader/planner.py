"""From a position in the stream to the plan of one step: the global batch first, then the packer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqmesh.loader.settings import LoaderSettings
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


def next_step(state: StreamState, lengths: Int64Array, supervised: Int64Array, settings: LoaderSettings) -> Step | None:
    """The step that begins at `state`, or None at the end of the last epoch.

    lengths, supervised [N]: of all documents of the set. Every machine that calls this gets the same step.
    """
    drawn = draw(state, lengths, settings)
    if drawn is None:
        return None
    documents, after = drawn
    whole = documents.length == lengths[documents.document]
    # A piece is a document of its own: its last token has no label, whatever follows it in the shard.
    learned = np.where(whole, supervised[documents.document], np.maximum(documents.length - 1, 0))
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
