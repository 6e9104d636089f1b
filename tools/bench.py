"""`seqmesh bench NAME`: run a benchmark, print its tables, write its JSON.

A benchmark is a module of `seqmesh.benchmarks` with `PEERS` and `run(quick=, against=)`; it is imported only when it is
run. `all` runs every one in turn.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from rich.console import Console

from seqmesh.benchmarks.harness import Report, Results, chosen_peers, environment, load, show
from seqmesh.loader.files import atomic_write

MODULES = {
    "packer": "seqmesh.benchmarks.packer",
    "rings": "seqmesh.benchmarks.rings",
    "loader": "seqmesh.benchmarks.loader",
    "train": "seqmesh.benchmarks.train",
}
ALL = "all"


class Benchmark(Protocol):
    """What a benchmark module offers. `against`: peers to measure, none named for all."""

    PEERS: tuple[str, ...]

    def run(self, *, quick: bool, against: tuple[str, ...]) -> Results: ...


def names() -> tuple[str, ...]:
    """What `run` takes as a name."""
    return (*MODULES, ALL)


def run(
    *,
    name: str,
    quick: bool,
    json_path: Path | None = None,
    against: tuple[str, ...] = (),
    console: Console | None = None,
) -> Report:
    """Run a benchmark, print it, write it to `json_path`.

    Raises ValueError for an unknown name, or for a peer that none of the benchmarks run knows; before anything runs.
    """
    if name not in names():
        raise ValueError(f"name is {name!r}: must be one of {', '.join(names())}")
    console = console or Console()
    chosen = {n: cast("Benchmark", import_module(MODULES[n])) for n in (MODULES if name == ALL else (name,))}
    known = tuple(peer for benchmark in chosen.values() for peer in benchmark.PEERS)
    where = environment(chosen_peers(known, against))
    results = Results()
    for each, benchmark in chosen.items():
        console.print(f"measuring {each} ...", highlight=False)
        results += benchmark.run(quick=quick, against=tuple(peer for peer in against if peer in benchmark.PEERS))
    where["load_after"] = load()
    report = Report(environment=where, rows=results.rows, ratios=results.ratios)
    show(report, console)
    if json_path is not None:
        atomic_write(json_path, report.to_json())
        console.print(f"wrote {json_path}", highlight=False)
    return report
