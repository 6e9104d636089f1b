"""Runs the peers of `peers_loading`, each in a process of its own interpreter, and makes rows of what they took.

`SEQMESH_PEERS` names a folder of environments, where a peer's interpreter is `NAME/bin/python`; a peer without one
there is looked for in the environment that runs the benchmark. Before anything is timed, the corpus is written once
as it is and once more for every peer that wants a format of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from seqmesh.benchmarks import peers_loading
from seqmesh.benchmarks.harness import Row, Spread, absent, installed_version, row
from seqmesh.benchmarks.peers_loading import RIVALS, Job, Rival
from seqmesh.benchmarks.shards import mapped_ids
from seqmesh.packer.lengths import Int64Array

ENVIRONMENTS = "SEQMESH_PEERS"
PACKAGE = Path(__file__).resolve().parents[1]
FEWER = 8  # times fewer documents for slow peers
ENDS = 2  # packs, and a token of each document: what a peer may lose that leaves out ends
TIMEOUT = 600.0  # seconds
LAST_WORDS = 2_000  # characters of a failed peer's output to repeat
RATE, SECONDS = "Mtok/CPU-s", "CPU-s"
TOTAL, TRAINER, FIRST = "total", "trainer", "first batch"
CASES = {TOTAL: RATE, TRAINER: RATE, FIRST: SECONDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a peer took. CPU seconds of its consuming process (trainer) and of all its processes (total) after the first
    batch, for `rest` tokens; `first`: of all, until then; `imports`: before."""

    tokens: int
    rest: int
    trainer: float
    total: float
    first: float
    imports: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer that is installed, with the documents written as it wants them, read by `workers` processes."""

    name: str
    rival: Rival
    version: str
    job: Job
    tokens: int  # of its documents

    @property
    def candidate(self) -> str:
        return f"{self.name}, {self.job.workers} worker{'' if self.job.workers == 1 else 's'}"

    @property
    def note(self) -> str:
        return f"{self.rival.package} {self.version}: {self.rival.gives}"

    def read(self) -> Reading:
        """Raises RuntimeError where the peer fails or does not deliver what it should."""
        found = answer(self.name, self.job)
        ends = 0 if self.rival.exact else ENDS * self.job.pack + self.job.documents
        if not self.tokens - ends <= found["tokens"] <= self.tokens:
            raise RuntimeError(f"{self.candidate}: {found['tokens']} tokens came of {self.tokens}")
        return Reading(
            tokens=found["tokens"],
            rest=found["rest_tokens"],
            trainer=found["rest"]["trainer"],
            total=found["rest"]["total"],
            first=found["first"]["total"],
            imports=found["imports"],
        )


def write_corpus(shards: Path, lengths: Int64Array, folder: Path) -> None:
    """The documents of a set as `peers_loading` reads them."""
    folder.mkdir()
    np.save(folder / "lengths.npy", lengths)
    with (folder / "tokens.bin").open("wb") as file:
        for ids in mapped_ids(shards):
            ids.astype(np.int32).tofile(file)


def prepared(
    names: tuple[str, ...], shards: Path, lengths: Int64Array, folder: Path, pack: int, variants: int
) -> dict[str, Peer]:
    """The named peers that are installed, ready to read the set, by candidate; their formats go under `folder`.
    variants: how many of a peer's numbers of workers are measured, the highest first."""
    corpus = folder / "corpus"
    write_corpus(shards, lengths, corpus)
    peers = [each for name in names for each in list(_prepared(name, corpus, lengths, folder, pack))[-variants:]]
    return {peer.candidate: peer for peer in peers}


def _prepared(name: str, corpus: Path, lengths: Int64Array, folder: Path, pack: int) -> Iterator[Peer]:
    if (version := version_of(name)) is None:
        return
    rival = RIVALS[name]
    documents = max(1, len(lengths) // FEWER) if rival.slow else len(lengths)
    job = Job(
        rival=name,
        action="export",
        corpus=str(corpus),
        documents=documents,
        exported=str(folder / f"{name}-data"),
        pack=pack,
    )
    answer(name, job)
    for workers in rival.workers:
        reading = replace(job, action="read", workers=workers)
        yield Peer(name=name, rival=rival, version=version, job=reading, tokens=int(lengths[:documents].sum()))


def version_of(name: str) -> str | None:
    """The version of a peer, None where it is not installed."""
    interpreter, package = own_interpreter(name), RIVALS[name].package
    if interpreter is None:
        return installed_version(package)
    asked = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    done = subprocess.run([str(interpreter), "-I", "-c", asked], capture_output=True, text=True, timeout=TIMEOUT)
    return done.stdout.strip() or None


def own_interpreter(name: str) -> Path | None:
    """That of the peer's own environment."""
    folder = os.environ.get(ENVIRONMENTS)
    found = Path(folder) / (RIVALS[name].environment or name) / "bin" / "python" if folder else None
    return found if found and found.exists() else None


def answer(name: str, job: Job) -> dict[str, Any]:
    """Run a job in the peer's process. Raises RuntimeError with the end of what it said where it fails.

    The process finds this package through a link in a folder of its own, where its temporary files go, too: nothing
    else of this environment may be found by a peer's."""
    scratch = Path(job.exported).parent
    with TemporaryDirectory(dir=scratch) as own:
        (Path(own) / "seqmesh").symlink_to(PACKAGE)
        places = {"PYTHONPATH": own, "TMPDIR": own, "RAY_TMPDIR": str(scratch)}  # Ray's sockets want a short path
        done = subprocess.run(
            [str(own_interpreter(name) or sys.executable), "-P", "-m", peers_loading.__name__, json.dumps(asdict(job))],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env={"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", **os.environ, **places},
        )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-LAST_WORDS:]
        raise RuntimeError(f"{name} ended with exit code {done.returncode} in {job.action}:\n{said}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peer_rows(case: str, peer: Peer, readings: list[Reading]) -> list[Row]:
    """Rates after the first batch, of all its processes and of the trainer alone, and the first batch."""
    rest = readings[0].rest / 1e6
    spreads = {
        TOTAL: Spread.of([each.total for each in readings]).rate(rest),
        TRAINER: Spread.of([each.trainer for each in readings]).rate(rest),
        FIRST: Spread.of([each.first for each in readings]),
    }
    read = {"tokens": readings[0].tokens, "left_out": peer.tokens - readings[0].tokens, "workers": peer.job.workers}
    counts: dict[str, Mapping[str, int | float]] = {
        TOTAL: read,
        TRAINER: read,
        FIRST: {"imports": Spread.of([each.imports for each in readings]).median},
    }
    rows = [row(f"{case}, {kind}", peer.candidate, spreads[kind], unit, **counts[kind]) for kind, unit in CASES.items()]
    return [replace(rows[0], note=peer.note), *rows[1:]]


def absent_rows(case: str, name: str) -> list[Row]:
    return [absent(f"{case}, {kind}", name, unit) for kind, unit in CASES.items()]
