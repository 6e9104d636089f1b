"""`seqmesh bench train`: where the time of a training step goes: waiting for data, computing, reducing.

A real job on two ranks, started by torchrun as a user would, on a shard set made on the spot, in mode `free` and in
mode `waves`, one after the other and over again. Documents are up to twice the capacity, so that rings occur. The
figures are those that the job's first rank logs for every step; the first steps, in which everything is warmed up, are
left out. The reduction of a step includes waiting for the slower rank. Low and high are those of the steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from seqmesh.benchmarks.harness import Ratio, Results, Row, Spread, chosen_peers, ratio, row
from seqmesh.benchmarks.lengths import python_documents
from seqmesh.benchmarks.shards import random_shards, scratch_folder

PEERS: tuple[str, ...] = ()
RANKS = 2
WARM_UP_STEPS = 3
VOCABULARY = 2_048
SET_TOKENS = 1 << 20
TIMEOUT = 600.0  # seconds for the whole job
LAST_WORDS = 2_000  # characters of a failed job's output to repeat
MODES = ("free", "waves")
ROUNDS = 2
STEP, OTHER = "step", "other"
PHASES = ("data", "compute", "reduce", "update", "save")  # as the trainer logs them


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the job is. width: of a model of `layers` layers. Tokens: in a step, in a micro-batch."""

    width: int
    layers: int
    tokens_per_step: int
    capacity: int
    steps: int


QUICK = Size(width=128, layers=2, tokens_per_step=8_192, capacity=2_048, steps=9)
FULL = Size(width=256, layers=4, tokens_per_step=32_768, capacity=8_192, steps=23)


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Train, read the log, split the steps."""
    chosen_peers(PEERS, against)
    size = QUICK if quick else FULL
    with scratch_folder(64 * SET_TOKENS) as scratch:
        random_shards(scratch / "set", python_documents(SET_TOKENS, RANKS * size.capacity), vocab_size=VOCABULARY)
        steps: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for turn in range(ROUNDS):
            for mode in MODES:
                folder = scratch / f"{mode}-{turn}"
                folder.mkdir()
                config = folder / "train.yaml"
                config.write_text(yaml.safe_dump(job(size, mode, data=scratch / "set", run_folder=folder / "run")))
                train(config, folder / "output.txt")
                steps[mode] += logged_steps(folder / "run" / "log.jsonl")
    parts = {mode: split(mode, steps[mode]) for mode in MODES}
    against_free = ratio("waves_vs_free", parts["waves"].rows[0], parts["free"].rows[0])
    return parts["free"] + parts["waves"] + Results(rows=(), ratios=(against_free,))


def job(size: Size, mode: str, *, data: Path, run_folder: Path) -> dict[str, Any]:
    """The configuration of the job. It saves one checkpoint, at its end, after the last counted step."""
    return {
        "run": str(run_folder),
        "steps": size.steps,
        "loader": {
            "data": str(data),
            "tokens_per_step": size.tokens_per_step,
            "capacity": size.capacity,
            "max_document": RANKS * size.capacity,
            "mode": mode,
            "seed": 0,
        },
        "model": {
            "vocab_size": VOCABULARY,
            "width": size.width,
            "layers": size.layers,
            "heads": size.width // 64,
            "kv_heads": max(1, size.width // 128),
        },
        "checkpoint": {"every": size.steps},
        "ranks": RANKS,
    }


def train(config: Path, output: Path) -> None:
    """Run the job to its end. Raises RuntimeError with the end of what it said where it fails."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, "-m", *launch, "-m", "seqmesh.trainer.train", str(config)]
    with output.open("wb") as sink:
        code = subprocess.run(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # ranks share the machine's cores: one thread each
        ).returncode
    if code != 0:
        raise RuntimeError(
            f"the training job ended with exit code {code}:\n{output.read_text(errors='replace')[-LAST_WORDS:]}"
        )


def logged_steps(log: Path) -> list[dict[str, Any]]:
    """The records of a job's steps, in order, without the warm-up."""
    from seqmesh.trainer.monitor import read_steps  # imports torch

    return list(read_steps(log).values())[WARM_UP_STEPS:]


def split(mode: str, steps: list[dict[str, Any]]) -> Results:
    """Rows of the step and its phases, in milliseconds, and each phase's share of the step."""
    case = f"step, {mode}"
    if not steps:
        raise ValueError(f"the job logged no step after the {WARM_UP_STEPS} of the warm-up")
    tokens = sum(record["tokens"] for record in steps)
    counts = {"steps": len(steps), "tokens": tokens, "rings": sum(record["rings"] for record in steps)}
    whole = _milliseconds(case, STEP, [record["total"] for record in steps], **counts)
    phases = [phase_row(case, phase, steps) for phase in (*PHASES, OTHER)]
    rates = Spread.of([record["tokens_per_second"] for record in steps])
    speed = row(case, "all ranks", rates, "tokens/s", tokens=tokens)
    return Results(rows=(whole, *phases, speed), ratios=tuple(share(each, whole) for each in phases))


def phase_row(case: str, phase: str, steps: list[dict[str, Any]]) -> Row:
    """Milliseconds of one phase; `other` is what the step takes and no phase claims."""
    if phase == OTHER:
        seconds = [record["total"] - sum(record["seconds"].values()) for record in steps]
    else:
        seconds = [record["seconds"].get(phase, 0.0) for record in steps]
    return _milliseconds(case, phase, seconds)


def share(phase: Row, whole: Row) -> Ratio:
    return ratio(f"{phase.candidate}_share", phase, whole)


def _milliseconds(case: str, name: str, seconds: list[float], **counts: int) -> Row:
    return row(case, name, Spread.of(seconds).scaled(1e3), "ms", **counts)
