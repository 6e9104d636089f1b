"""`seqmesh bench NAME`: run a benchmark, print its tables, write its JSON.

A benchmark is a module of `seqmesh.benchmarks` with `PEERS` and `run(quick=, against=)`; it is imported only when it is
run. `all` runs every one in turn.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from rich.console import Console

from seqmesh.benchmarks.harness import Report, Results, chosen_peers, environment, load, show
from seqmesh.loader.files import atomic_write

MODULES = {
    "packer": "seqmesh.benchmarks.packer",
    "planner": "seqmesh.benchmarks.planner",
    "rings": "seqmesh.benchmarks.rings",
    "loader": "seqmesh.benchmarks.loader",
    "sources": "seqmesh.benchmarks.sources",
    "ledger": "seqmesh.benchmarks.ledger",
    "prepare": "seqmesh.benchmarks.prepare",
    "loss": "seqmesh.benchmarks.loss",
    "offload": "seqmesh.benchmarks.offload",
    "train": "seqmesh.benchmarks.train",
    "lamb": "seqmesh.benchmarks.optimizers",
    "hybrid": "seqmesh.benchmarks.hybrid",
    "pipeline": "seqmesh.benchmarks.pipelines",
    "curves": "seqmesh.benchmarks.curves",
    "checkpoint": "seqmesh.benchmarks.checkpoints",
    "attention": "seqmesh.benchmarks.attention",
    "calibrate": "seqmesh.benchmarks.calibrate",
}
ALL = "all"
FILE_WIDTH = 160  # columns of tables that go into a file, which rich would take for a narrow terminal
# What a benchmark writes besides: its keyword, and what its file is.
COST, PLOT = "cost_path", "plot_path"
WRITES = {"calibrate": (COST, "a cost file"), "curves": (PLOT, "a picture")}


class Benchmark(Protocol):
    """What a benchmark module offers. `against`: peers to measure, none named for all."""

    PEERS: tuple[str, ...]

    def run(self, *, quick: bool, against: tuple[str, ...], **extra: Path) -> Results: ...


def names() -> tuple[str, ...]:
    """What `run` takes as a name."""
    return (*MODULES, ALL)


def run(
    *,
    name: str,
    quick: bool,
    json_path: Path | None = None,
    against: tuple[str, ...] = (),
    cost_path: Path | None = None,
    plot_path: Path | None = None,
    console: Console | None = None,
) -> Report:
    """Run a benchmark, print it, write it to `json_path`; the cost model of `calibrate` to `cost_path`, the picture of
    `curves` to `plot_path`.

    Raises ValueError for an unknown name, for a file that another benchmark writes, or for a peer that none of the
    benchmarks run knows; before anything runs.
    """
    if name not in names():
        raise ValueError(f"name is {name!r}: must be one of {', '.join(names())}")
    extra = {key: path for key, path in {COST: cost_path, PLOT: plot_path}.items() if path is not None}
    for writer, (key, what) in WRITES.items():
        if key in extra and name != writer:
            raise ValueError(
                f"{key.removesuffix('_path')} is {extra[key]}: {what} is written by {writer} alone, not by {name}"
            )
    console = console or Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    chosen = {n: cast("Benchmark", import_module(MODULES[n])) for n in (MODULES if name == ALL else (name,))}
    known = tuple(peer for benchmark in chosen.values() for peer in benchmark.PEERS)
    where = environment(chosen_peers(known, against))
    results = Results()
    for each, benchmark in chosen.items():
        console.print(f"measuring {each} ...", highlight=False)
        own = tuple(peer for peer in against if peer in benchmark.PEERS)
        results += benchmark.run(quick=quick, against=own, **extra)
    where["load_after"] = load()
    report = Report(environment=where, rows=results.rows, ratios=results.ratios)
    show(report, console)
    if json_path is not None:
        atomic_write(json_path, report.to_json())
        console.print(f"wrote {json_path}", highlight=False)
    for path in extra.values():
        console.print(f"wrote {path}", highlight=False)
    return report
