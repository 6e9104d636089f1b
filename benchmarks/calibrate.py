"""`seqmesh bench calibrate`: the cost model of this machine, from timings of the real model, and how far to trust it.

Micro-batches of many shapes, with one long document, many short ones, or real mixtures, run forward and backward on two
ranks at a time; rings over both are among them. The terms of `packer.cost.CostModel` are fitted to the lowest of each
one's repeats, since other work on the machine only ever adds, and compared with micro-batches that were not fitted. On
a CPU those without rings are timed in CPU seconds, but rings by the wall: trust them only where nothing else runs. A
row's traffic is what rings show beyond their attention, if plain messages between the ranks bear that out; if not, it
is that of the messages: what else rings take, waits and small messages above all, is not a matter of rows. With
`cost_path` the model is written as a cost file, which all ranks of a job share. The model is small here, so the terms
are those of its own shape, which the file names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import TypeAdapter

from seqmesh.benchmarks.harness import Results, Row, Spread, chosen_peers, count_ratio, environment, ratio, row
from seqmesh.benchmarks.lengths import python_documents
from seqmesh.benchmarks.ranks import ask_ranks
from seqmesh.loader.cost_file import write_cost
from seqmesh.packer.cost import ModelShape, attended_pairs
from seqmesh.packer.fit import Fit, Sample, fit_cost, make_fit, non_negative, predict
from seqmesh.packer.pieces import piece_pairs, piece_rows, piece_tokens

PEERS: tuple[str, ...] = ()
RANKS = 2
VOCABULARY = 512
MESSAGES = (1 << 16, 1 << 20, 1 << 22)  # bytes
NUMBER_BYTES = 4  # float32
BORNE_OUT = 4.0  # most times what messages say of a row that rings may
SHORT, MIDDLE = 64, 256  # tokens of documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """width, layers: of the model. tokens: of the largest micro-batch. repeats: of every micro-batch."""

    width: int
    layers: int
    tokens: int
    repeats: int


QUICK = Size(width=128, layers=2, tokens=2_048, repeats=5)
FULL = Size(width=256, layers=4, tokens=8_192, repeats=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """whole: lengths of documents that each rank holds. rings: lengths of documents that all ranks share."""

    name: str
    whole: tuple[int, ...] = ()
    rings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What ranks are asked: run each micro-batch `repeats` times with a model of these settings (`ModelConfig`), and
    send messages of so many bytes."""

    model: dict[str, int]
    batches: tuple[MicroBatch, ...]
    messages: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of the first rank: of every repeat of every micro-batch, and of every message by its bytes."""

    device: str
    batches: dict[str, list[float]]
    messages: dict[int, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Seconds. shown: of a row, as rings show it; 0 where attention hid all traffic. messages: of a row, as plain
    messages say; 0 where there was one rank. used: which of the two the model has. beyond: what a ring takes over the
    model, the median of those fitted."""

    shown: float
    messages: float
    used: str
    beyond: float


def run(*, quick: bool, against: tuple[str, ...] = (), cost_path: Path | None = None) -> Results:
    """Measure, fit, compare; write a cost file where one is wanted."""
    chosen_peers(PEERS, against)
    where = environment()
    size, ranks = (QUICK if quick else FULL), min(RANKS, len(os.sched_getaffinity(0)))
    fitted, held_out = fitted_batches(size, ranks), held_out_batches(size, ranks)
    model = model_settings(size)
    job = Job(
        model=model,
        batches=(*fitted, *held_out),
        messages=MESSAGES if ranks > 1 else (),
        repeats=size.repeats,
    )
    timings = time_job(job, ranks)
    shape = shape_of(model)
    samples = {each.name: sample_of(each, min(timings.batches[each.name]), ranks) for each in job.batches}
    fit, links = fit_terms([samples[each.name] for each in fitted], timings, shape)
    if cost_path is not None:
        origin = {"device": timings.device, "ranks": ranks, "row": links.used, "model": asdict(shape)}
        write_cost(cost_path, fit, where | origin)
    results = terms(fit, shape, links)
    for name, batches in (("fit", fitted), ("held_out", held_out)):
        whole, rings = ([each for each in batches if bool(each.rings) is ringed] for ringed in (False, True))
        results += compare(name, fit, timings, {each.name: samples[each.name] for each in whole})
        results += compare(f"{name}_rings", fit, timings, {each.name: samples[each.name] for each in rings})
    return results


def fitted_batches(size: Size, ranks: int) -> tuple[MicroBatch, ...]:
    """One document of each length, many of one length, a mixture; then rings, alone and beside whole documents."""
    lengths = [size.tokens >> halvings for halvings in range(5)]
    alone = [MicroBatch(name=f"1 x {n}", whole=(n,)) for n in lengths]
    many = [
        MicroBatch(name=f"{tokens // n} x {n}", whole=(n,) * (tokens // n))
        for n in (SHORT, MIDDLE)
        for tokens in (size.tokens // 4, size.tokens)
    ]
    mixed = [_mixture(size.tokens // part, seed=part) for part in (1, 4)]
    rings = [MicroBatch(name=f"ring of {n}", rings=(n,)) for n in lengths]
    beside = [MicroBatch(name=f"ring of {n}, 4 x {MIDDLE}", rings=(n,), whole=(MIDDLE,) * 4) for n in lengths[1:3]]
    return (*alone, *many, *mixed, *(rings + beside if ranks > 1 else ()))


def held_out_batches(size: Size, ranks: int) -> tuple[MicroBatch, ...]:
    """Shapes that differ from all fitted ones."""
    long = 5 * size.tokens // 8
    mixed = [_mixture(size.tokens // part, seed=10 + part) for part in (2, 3)]
    whole = [
        MicroBatch(name=f"1 x {long}, 8 x {SHORT + SHORT // 2}", whole=(long, *[SHORT + SHORT // 2] * 8)),
        MicroBatch(name=f"1 x {3 * size.tokens // 8}", whole=(3 * size.tokens // 8,)),
    ]
    rings = [MicroBatch(name=f"ring of {long}, 2 x {MIDDLE}", rings=(long,), whole=(MIDDLE,) * 2)]
    return (*mixed, *whole, *(rings if ranks > 1 else ()))


def _mixture(tokens: int, *, seed: int) -> MicroBatch:
    """Lengths of real files."""
    lengths = python_documents(tokens, 3 * tokens // 4, seed=seed)
    return MicroBatch(name=f"{len(lengths)} files of {tokens} in all", whole=tuple(lengths.tolist()))


def model_settings(size: Size) -> dict[str, int]:
    """Of `trainer.models.config.ModelConfig`."""
    heads = size.width // 64
    kv_heads = max(1, heads // 2)
    return {
        "vocab_size": VOCABULARY,
        "width": size.width,
        "layers": size.layers,
        "heads": heads,
        "kv_heads": kv_heads,
    }


def shape_of(model: dict[str, int]) -> ModelShape:
    """The shape that the trainer counts for these settings."""
    from seqmesh.trainer.models.config import ModelConfig  # imports torch

    return replace(TypeAdapter(ModelConfig).validate_python(model).shape, number_bytes=NUMBER_BYTES)


def time_job(job: Job, ranks: int) -> Timings:
    """Have the ranks measure."""
    return TypeAdapter(Timings).validate_json(ask_ranks("seqmesh.benchmarks.calibrate_rank", asdict(job), ranks))


def sample_of(batch: MicroBatch, seconds: float, ranks: int) -> Sample:
    """What the first rank held, of which it has the most keys to see."""
    whole = np.array(batch.whole, np.int64)
    rings = np.array(batch.rings, np.int64)
    sizes, index = np.full_like(rings, ranks), np.zeros_like(rings)
    return Sample(
        tokens=int(whole.sum() + piece_tokens(rings, sizes, index).sum()),
        pairs=int(attended_pairs(whole).sum() + piece_pairs(rings, sizes, index).sum()),
        rows_near=int(piece_rows(rings, sizes, index).sum()),
        seconds=seconds,
    )


def fit_terms(samples: Sequence[Sample], timings: Timings, shape: ModelShape) -> tuple[Fit, Links]:
    """The fit, with a row's term that messages bear out; the same far as near, since one machine knows no other."""
    fit = fit_cost(samples)
    shown, messages = fit.seconds.row_near, shape.bytes_per_row * link(timings.messages)
    used, near = ("rings", shown) if 0 < shown <= BORNE_OUT * messages else ("messages", messages)
    found = make_fit(replace(fit.seconds, row_near=near, row_far=near), samples)
    beyond = [sample.seconds - float(predict(found.seconds, [sample])[0]) for sample in samples if sample.rows_near]
    return found, Links(shown=shown, messages=messages, used=used, beyond=median(beyond) if beyond else 0.0)


def link(messages: Mapping[int, Sequence[float]]) -> float:
    """Seconds of a byte between two ranks, without what any message takes; 0 without messages."""
    if not messages:
        return 0.0
    taken = np.array([min(seconds) for seconds in messages.values()])
    columns = np.array([(1.0, size) for size in messages])
    return non_negative(columns / taken[:, None], np.ones_like(taken))[1]


def terms(fit: Fit, shape: ModelShape, links: Links) -> Results:
    """The terms, the work that they amount to, and where the quadratic overtakes the linear one."""
    s = fit.seconds
    rows = [
        _one("fixed", s.fixed * 1e3, "ms", units=fit.cost.fixed),
        _one("linear", s.linear * 1e6, "µs/token", units=fit.cost.linear, flops=shape.flops_per_token),
        _one("quadratic", s.quadratic * 1e9, "ns/pair", units=fit.cost.quadratic, flops=shape.flops_per_pair),
        _one("row", s.row_near * 1e6, "µs/row", units=fit.cost.row_near, bytes=shape.bytes_per_row),
        _one("unit", fit.unit * 1e9, "ns", rounding=fit.rounding),
    ]
    if fit.crossover < float("inf"):
        rows.append(_one("crossover", fit.crossover, "tokens"))
    if not links.messages:
        return Results(rows=tuple(rows))
    shown = _one("row, shown by rings", links.shown * 1e6, "µs/row", used=int(links.used == "rings"))
    said = _one("row, said by messages", links.messages * 1e6, "µs/row", used=int(links.used == "messages"))
    beyond = _one("ring, beyond the model", links.beyond * 1e3, "ms")
    return Results(rows=(*rows, shown, said, beyond), ratios=(ratio("rings_vs_messages", shown, said),))


def compare(name: str, fit: Fit, timings: Timings, samples: Mapping[str, Sample]) -> Results:
    """Every micro-batch, with what the fit predicts, and the relative errors of the median and of the worst one."""
    if not samples:
        return Results()
    rows = [_compared(f"{name}, {case}", fit, timings.batches[case], sample) for case, sample in samples.items()]
    ranked = sorted(rows, key=lambda each: each.counts["off_by"] / each.counts["lowest"])
    ends = {"median": ranked[len(ranked) // 2], "worst": ranked[-1]}
    return Results(
        rows=tuple(rows),
        ratios=tuple(count_ratio(f"{name}_{which}_error", each, "off_by", "lowest") for which, each in ends.items()),
    )


def _compared(case: str, fit: Fit, seconds: Sequence[float], sample: Sample) -> Row:
    """Counts in milliseconds: the lowest of the repeats, what the fit predicts, and how far that is off."""
    predicted, lowest = float(predict(fit.seconds, [sample])[0]) * 1e3, sample.seconds * 1e3
    counts = {"tokens": sample.tokens, "pairs": sample.pairs, "rows": sample.rows_near}
    figures = {"lowest": lowest, "predicted": predicted, "off_by": abs(predicted - lowest)}
    return row(case, "measured", Spread.of(seconds).scaled(1e3), "ms", **counts, **figures)


def _one(candidate: str, value: float, unit: str, **counts: int | float) -> Row:
    """A row of a single figure."""
    return row("terms", candidate, Spread.of([value]), unit, **counts)
