"""`seqmesh bench lamb`: what an optimizer's step takes on parameters that lie on several ranks.

Real ranks (gloo), one thread each, on the shapes of a small model, every parameter cut over all ranks (DTensor): our
LAMB beside timm's, which takes the same steps (how far they come apart is measured, too), and AdamW fused beside plain.
`stretches` is our LAMB where the shard is a stretch of one buffer, as `sharding: optimizer` has it. The time is that of
the slowest rank; counted are the exchanges that a step starts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from seqmesh.benchmarks.harness import Results, Row, Spread, absent, chosen_peers, ratio, row
from seqmesh.benchmarks.ranks import ask_ranks

TIMM = "timm"
PEERS: tuple[str, ...] = (TIMM,)
MODULE = "seqmesh.benchmarks.optimizers_rank"
LAMB, STRETCHES, TIMM_LAMB = "lamb", "lamb, stretches", "lamb, timm"
FUSED, PLAIN = "adamw, fused", "adamw, plain"
CANDIDATES = (LAMB, STRETCHES, TIMM_LAMB, FUSED, PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What ranks are asked. width, layers, vocabulary: of the model whose parameters are updated."""

    width: int
    layers: int
    vocabulary: int
    repeats: int
    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """seconds: of the slowest rank, of every repeat of every candidate that is there. exchanges: that one step starts
    on a rank. elements: of all parameters. apart: the largest difference between our LAMB's parameters and timm's after
    all steps, relative to the parameter's norm; None without timm."""

    seconds: dict[str, list[float]]
    exchanges: dict[str, int]
    elements: int
    apart: float | None


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Ask two ranks, and four."""
    peers = chosen_peers(PEERS, against)
    candidates = tuple(name for name in CANDIDATES if name != TIMM_LAMB or TIMM in peers)
    width, repeats = (256, 5) if quick else (512, 9)
    job = Job(width=width, layers=6, vocabulary=8_192, repeats=repeats, candidates=candidates)
    results = Results()
    for ranks in (2,) if quick else (2, 4):
        answer = TypeAdapter(Answer).validate_json(ask_ranks(MODULE, asdict(job), ranks))
        results += compare(f"step, {ranks} ranks", job, answer)
    return results


def compare(case: str, job: Job, answer: Answer) -> Results:
    """A row of every candidate, and the ratios."""
    rows = {name: _row(case, name, answer) for name in job.candidates}
    ratios = [ratio("adamw_plain_vs_fused", rows[PLAIN], rows[FUSED])]
    if TIMM_LAMB in rows:
        ratios += [ratio("timm_vs_lamb", rows[TIMM_LAMB], rows[LAMB])]
        ratios += [ratio("timm_vs_lamb_stretches", rows[TIMM_LAMB], rows[STRETCHES])]
    return Results(rows=tuple(rows.values()), ratios=tuple(ratios))


def _row(case: str, name: str, answer: Answer) -> Row:
    if name not in answer.seconds:
        return absent(case, name, "ms")
    counts: dict[str, int | float] = {"elements": answer.elements, "exchanges": answer.exchanges[name]}
    if name == TIMM_LAMB and answer.apart is not None:
        counts["apart"] = answer.apart
    return row(case, name, Spread.of(answer.seconds[name]).scaled(1e3), "ms", **counts)
