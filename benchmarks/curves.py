"""`seqmesh bench curves`: one training job on real text in six ways, which must give one loss curve.

The text is this machine's Python files; global batches, first weights, optimizer and schedule are the same for all:

* `free`, `waves`: jobs of the trainer on two ranks;
* `4, 2, 3 ranks`: a job that is killed twice and goes on with another number of ranks;
* `static`: our trainer with every document over all ranks that the longest needs;
* `padded`, `packed`: a loop of plain PyTorch under DistributedDataParallel, with documents as rows of one length, or
  end to end in one row with attention document by document.

Curves are compared step by step with `free`; in float32 they part slowly, by rounding. Rates are of whole steps without
saving, by the wall, of all ranks together; the first steps are left out. With `plot_path` the curves are drawn.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import TypeAdapter

from seqmesh.benchmarks.children import CLI, spend
from seqmesh.benchmarks.harness import Results, Spread, chosen_peers, ratio, row
from seqmesh.benchmarks.hybrid import FREE, PACKED, STATIC, WAVES
from seqmesh.benchmarks.ranks import ask_ranks
from seqmesh.benchmarks.shards import scratch_folder
from seqmesh.tools.corpus import build_corpus

PEERS: tuple[str, ...] = ()
MODULE = "seqmesh.benchmarks.curves_rank"
CHANGING, PADDED = "4, 2, 3 ranks", "padded"
MESHES = (4, 2, 3)
RANKS = 2
WARM_UP_STEPS = 3
LAST_STEPS = 20  # over which a final loss is the mean
DEADLINE = 3_600.0  # seconds for one job


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What ranks are asked: train as the configuration file says, in another way."""

    config: str
    way: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Of each step: its loss, how long it took, its tokens."""

    losses: list[float]
    seconds: list[float]
    tokens: list[int]

    @property
    def rate(self) -> Spread:
        """Tokens per second, of steps after the first ones."""
        rates = np.array(self.tokens[WARM_UP_STEPS:]) / np.array(self.seconds[WARM_UP_STEPS:])
        return Spread.of(rates.tolist())

    @property
    def final(self) -> float:
        return float(np.mean(self.losses[-LAST_STEPS:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """text: bytes of the corpus. tokens, capacity: of a step, of a rank's micro-batch."""

    text: int
    vocabulary: int
    width: int
    layers: int
    tokens: int
    capacity: int
    steps: int
    ways: tuple[str, ...]


QUICK = Size(
    text=2 << 20,
    vocabulary=512,
    width=64,
    layers=2,
    tokens=4_096,
    capacity=1_024,
    steps=12,
    ways=(FREE, STATIC, PACKED),
)
FULL = Size(
    text=16 << 20,
    vocabulary=2_048,
    width=64,
    layers=2,
    tokens=4_096,
    capacity=1_024,
    steps=300,
    ways=(FREE, WAVES, CHANGING, STATIC, PADDED, PACKED),
)


def run(*, quick: bool, against: tuple[str, ...] = (), plot_path: Path | None = None) -> Results:
    """Train in every way, compare, draw."""
    chosen_peers(PEERS, against)
    size = QUICK if quick else FULL
    with scratch_folder(32 * size.text) as scratch:
        write_set(scratch, size)
        curves = {way: trained(scratch, size, way) for way in size.ways}
    if plot_path is not None:
        draw(curves, plot_path)
    return compare(curves)


def write_set(scratch: Path, size: Size) -> None:
    """The corpus, prepared."""
    build_corpus(scratch / "corpus.jsonl", max_bytes=size.text)
    options = ["--tokenizer", f"train:{size.vocabulary}", "--out", str(scratch / "set")]
    spend([*CLI, "prepare", str(scratch / "corpus.jsonl"), *options])


def write_job(scratch: Path, size: Size, way: str, *, mode: str = "free") -> Path:
    """The configuration; a checkpoint now and then for the job that is killed, one at the end for the others."""
    fields: dict[str, Any] = {
        "run": str(scratch / f"run-{way}"),
        "steps": size.steps,
        "ranks": RANKS,
        "loader": {
            "data": str(scratch / "set"),
            "tokens_per_step": size.tokens,
            "capacity": size.capacity,
            "max_document": RANKS * size.capacity,
            "overlong": "split",
            "mode": mode,
            "seed": 0,
        },
        "model": {
            "vocab_size": size.vocabulary,
            "width": size.width,
            "layers": size.layers,
            "heads": size.width // 32,
            "kv_heads": size.width // 64,
        },
        "optim": {"lr": 3e-3, "warmup": size.steps // 10},
        "checkpoint": {"every": max(size.steps // 12, 1) if way == CHANGING else size.steps},
    }
    path = scratch / f"{way}.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def trained(scratch: Path, size: Size, way: str) -> Curve:
    """The way's curve."""
    if way == CHANGING:
        return trained_on_changing_ranks(scratch, size)
    if way not in (FREE, WAVES):
        return trained_otherwise(scratch, size, way)
    spend([*CLI, "train", str(write_job(scratch, size, way, mode=way))])
    return logged(scratch / f"run-{way}")


def trained_on_changing_ranks(scratch: Path, size: Size) -> Curve:
    """A job that is killed after each part of its steps and goes on with another number of ranks."""
    job, folder = write_job(scratch, size, CHANGING), scratch / f"run-{CHANGING}"
    for part, ranks in enumerate(MESHES, start=1):
        command = [*CLI, "train", str(job), f"ranks={ranks}"]
        if part == len(MESHES):
            spend(command)
        else:
            kill_after(command, folder, part * size.steps // len(MESHES))
    return logged(folder)


def kill_after(command: Sequence[str], folder: Path, step: int) -> None:
    """Run a job until its log has a step; then SIGKILL all of it. Raises RuntimeError where it ends before."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    deadline = time.monotonic() + DEADLINE
    try:
        while not (folder / "log.jsonl").exists() or len(read_log(folder)) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job on the way to step {step} ended, or took over {DEADLINE:g} s")
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trained_otherwise(scratch: Path, size: Size, way: str) -> Curve:
    """Not by the trainer's loop."""
    job = Job(config=str(write_job(scratch, size, way)), way=way)
    return TypeAdapter(Curve).validate_json(ask_ranks(MODULE, asdict(job), RANKS, timeout=DEADLINE))


def read_log(folder: Path) -> dict[int, dict[str, Any]]:
    """Records by step, the last of each."""
    from seqmesh.trainer.monitor import read_steps  # imports torch

    return read_steps(folder / "log.jsonl")


def logged(folder: Path) -> Curve:
    """What a job's log says."""
    steps = list(read_log(folder).values())
    return Curve(
        losses=[step["loss"] for step in steps],
        seconds=[step["total"] - step["seconds"].get("save", 0.0) for step in steps],
        tokens=[step["tokens"] for step in steps],
    )


def compare(curves: Mapping[str, Curve]) -> Results:
    """Losses and rates. Raises RuntimeError where a way had other global batches."""
    if others := [way for way, curve in curves.items() if curve.tokens != curves[FREE].tokens]:
        raise RuntimeError(f"{', '.join(others)}: trained on other global batches than {FREE}")
    rates, rows = {}, []
    for way, curve in curves.items():
        apart = np.abs(np.array(curve.losses) / np.array(curves[FREE].losses) - 1)
        counts = {"first": curve.losses[0], "furthest_from_free": float(apart.max()), "steps": len(curve.losses)}
        rows.append(row("loss, last steps", way, Spread.of([curve.final]), "nats", **counts))
        rates[way] = row("all ranks", way, curve.rate, "tokens/s")
    ways = [way for way in curves if way not in (FREE, CHANGING)]  # the latter has other numbers of ranks
    ratios = tuple(ratio(f"rate_free_vs_{way}", rates[FREE], rates[way]) for way in ways)
    return Results(rows=(*rows, *rates.values()), ratios=ratios)


def draw(curves: Mapping[str, Curve], path: Path) -> None:
    """The curves over each other, each narrower than the one before; below, how far they are from `free`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for place, (way, curve) in enumerate(curves.items()):
        steps = range(1, len(curve.losses) + 1)
        above.plot(steps, curve.losses, label=way, linewidth=5.5 - 0.9 * place, alpha=0.8)
        if way != FREE:
            apart = np.array(curve.losses) - np.array(curves[FREE].losses)
            below.plot(steps, apart, color=f"C{place}", linewidth=1)
    above.set_ylabel("loss, nats per token")
    above.legend()
    below.set_ylabel(f"minus that of {FREE}")
    below.set_xlabel("step")
    figure.savefig(path, dpi=130)
