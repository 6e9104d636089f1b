"""`seqmesh demo`: the whole line on real documents that every machine has, with a kill in the middle.

The Python sources of this interpreter and its packages become a corpus; it is prepared with a tokenizer trained on it;
a dedicated loader process feeds two ranks that train a small transformer. The job is killed once and resumes from its
checkpoint. At the end, the batches that the interrupted run was served are compared, one by one, with those of an
uninterrupted pass through a fresh loader process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from seqmesh.loader.batch import batch_digest, step_digest
from seqmesh.loader.embedded import Loader
from seqmesh.loader.manifest import read_manifest
from seqmesh.loader.process import LoaderProcess
from seqmesh.tools import corpus, prepare, report
from seqmesh.trainer.config import TrainConfig, load_config
from seqmesh.trainer.monitor import read_steps
from seqmesh.trainer.train import loader_settings

SEED = 2024
MAX_TOKENS = 8_000_000
MAX_BYTES = 48 << 20  # of text: enough for MAX_TOKENS, since a token of this corpus is under five bytes
VOCABULARY = 4096
RANKS = 2
CAPACITY = 4096
KILL_AFTER = 10  # steps: not one that has a checkpoint, so that some are done again
DEADLINE = 600.0

CONFIG = {
    "steps": 24,
    "ranks": RANKS,
    "seed": SEED,
    # A document may be twice what a rank holds: those over the capacity are spread over both ranks.
    "loader": {
        "tokens_per_step": 24_576,
        "capacity": CAPACITY,
        "max_document": RANKS * CAPACITY,
        "overlong": "split",
        "seed": SEED,
    },
    "model": {"vocab_size": VOCABULARY, "width": 128, "layers": 2, "heads": 4, "kv_heads": 2},
    "optim": {"lr": 4e-3, "warmup": 4},
    "checkpoint": {"every": 8},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Batches of all ranks: steps compared, steps that were served twice, and one digest of each run."""

    steps: int
    repeated: int
    interrupted: str
    uninterrupted: str


def run(*, folder: Path, console: Console | None = None) -> None:
    """The whole demonstration. Raises FileExistsError for a folder that is in use, RuntimeError where a part fails or
    the two runs were served different batches."""
    console = console or Console()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: give a new folder, or remove it")
    begin = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    _heading(console, "1. corpus: this machine's Python sources")
    corpus.run(out=folder / "corpus.jsonl", seed=SEED, max_bytes=MAX_BYTES, console=console)
    _heading(console, "2. prepare: a tokenizer and shards")
    options = prepare.PrepareOptions(
        inputs=(str(folder / "corpus.jsonl"),),
        out=folder / "shards",
        tokenizer=f"train:{VOCABULARY}",
        max_tokens=MAX_TOKENS,
        shard_tokens=2_000_000,
    )
    prepare.run(options, console=console)
    config = write_config(folder)
    _heading(console, f"3. train on {RANKS} ranks, to be killed after step {KILL_AFTER}")
    train_until_killed(folder / "job.yaml", Path(config.run), after=KILL_AFTER)
    console.print(f"killed with SIGKILL after step {KILL_AFTER}", style="bold red")
    _heading(console, "4. the same command again: it resumes")
    with start_training(folder / "job.yaml") as job:
        if job.wait(DEADLINE) != 0:
            raise RuntimeError(f"the training job ended with exit code {job.returncode}")
    _heading(console, "5. compare with an uninterrupted pass through a fresh loader process")
    comparison = compare(config)
    _heading(console, "6. result")
    report.run(folder=Path(config.run), console=console)
    console.print(_result_table(folder, comparison, time.monotonic() - begin))
    if comparison.interrupted != comparison.uninterrupted:
        raise RuntimeError("the interrupted run was served other batches than an uninterrupted one")


def write_config(folder: Path) -> TrainConfig:
    """Write job.yaml for the shards in `folder`; returns what it says."""
    fields = {"run": str(folder / "run")} | CONFIG
    fields["loader"] = {"data": str(folder / "shards")} | CONFIG["loader"]  # type: ignore[operator]  # it is a dict
    (folder / "job.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    return load_config(folder / "job.yaml")


def start_training(config: Path) -> subprocess.Popen[bytes]:
    """`seqmesh train` in a session of its own, so that a kill reaches torchrun, the ranks and nobody else."""
    return subprocess.Popen([sys.executable, "-m", "seqmesh.tools.cli", "train", str(config)], start_new_session=True)


def train_until_killed(config: Path, run_folder: Path, *, after: int) -> None:
    """Train, and SIGKILL everything of the job at once when the log shows step `after`."""
    deadline = time.monotonic() + DEADLINE
    with start_training(config) as job:
        try:
            while _steps_done(run_folder) < after:
                if job.poll() is not None:
                    raise RuntimeError(f"the training job ended with exit code {job.returncode} before it was killed")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the training job did not reach step {after} within {DEADLINE:g} s")
                time.sleep(0.02)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)


def compare(config: TrainConfig) -> Comparison:
    """Digests of what every rank was served, and of the same steps from a loader that nobody interrupted.

    Raises RuntimeError if a step that was served twice was not the same both times.
    """
    served: list[str] = []
    expected: list[str] = []
    repeated = 0
    with LoaderProcess(loader_settings(config, config.ranks)) as process:
        for rank in range(config.ranks):
            path = Path(config.run) / f"batches-{rank}.jsonl"
            steps = read_steps(path)
            repeated += len(path.read_text().splitlines()) - len(steps)
            _check_repeats(path)
            served += [record["digest"] for record in steps.values()]
            expected += step_digests(process.endpoint, rank, config.steps)
    return Comparison(
        steps=len(served),
        repeated=repeated,
        interrupted=step_digest(served),
        uninterrupted=step_digest(expected),
    )


def step_digests(endpoint: str, rank: int, steps: int) -> list[str]:
    """One digest for each of the first steps of a rank."""
    found: list[str] = []
    batches: list[str] = []
    with Loader(endpoint=endpoint, rank=rank) as loader:
        for batch in loader:
            batches.append(batch_digest(batch))
            if batch.last_in_step:
                found.append(step_digest(batches))
                batches = []
                if len(found) == steps:
                    break
    return found


def _check_repeats(path: Path) -> None:
    lines = {line for line in path.read_text().splitlines() if line.endswith("}")}
    if len(lines) != len(read_steps(path)):
        raise RuntimeError(f"{path}: a step that was done again after the kill was served other batches")


def _steps_done(run_folder: Path) -> int:
    log = run_folder / "log.jsonl"
    return max(read_steps(log), default=0) if log.exists() else 0


def _heading(console: Console, text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


def _result_table(folder: Path, comparison: Comparison, seconds: float) -> Table:
    manifest = read_manifest(folder / "shards")
    table = Table(show_header=False, title="interrupted and uninterrupted run", title_justify="left")
    table.add_row("corpus", f"{manifest.documents:,} documents, {manifest.tokens:,} tokens")
    table.add_row("batches compared", f"those of {comparison.steps} steps of ranks, {comparison.repeated} served twice")
    table.add_row("interrupted", comparison.interrupted)
    table.add_row("uninterrupted", comparison.uninterrupted)
    steps = read_steps(folder / "run" / "log.jsonl").values()
    table.add_row("rings", f"{sum(step['rings'] for step in steps)} documents were spread over {RANKS} ranks")
    same = comparison.interrupted == comparison.uninterrupted
    table.add_row("equal", "[green]yes" if same else "[red]NO")
    table.add_row("time", f"{seconds:.0f} s")
    return table
