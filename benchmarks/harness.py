"""What all benchmarks share: interleaved candidates, rows, ratios, the environment, the JSON and the table.

A benchmark is a plain function that returns rows and ratios. Candidates take turns, round by round, so that a busy
moment of the machine meets all of them alike; the first round is a warm-up and is thrown away. No candidate is known
here, and nothing heavy is imported: versions are read from the installed packages' metadata.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

PACKAGES = ("seqmesh", "numpy", "numba", "torch", "pyarrow", "pyzmq")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, lowest and highest of the repeats, in the unit of what was measured."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def rate(self, amount: float) -> Spread:
        """Seconds for `amount` things turned into things per second."""
        return Spread(median=amount / self.median, low=amount / self.high, high=amount / self.low)

    def scaled(self, factor: float) -> Spread:
        return Spread(median=self.median * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate in one case. value: the figure in `unit`, the median of the repeats; all None for a candidate
    that is absent, because it is not installed. counts: exact numbers that belong to it, such as bins or bytes. note:
    what a reader must know to compare it."""

    case: str
    candidate: str
    value: float | None
    unit: str
    median: float | None
    low: float | None
    high: float | None
    counts: dict[str, int | float] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        """How ratios refer to it."""
        return f"{self.case}/{self.candidate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """figure: its name. value = numerator / denominator, which name rows as `case/candidate`, or a count of a row as
    `case/candidate:count`; None where one of the two is absent."""

    figure: str
    value: float | None
    numerator: str
    denominator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What one benchmark found."""

    rows: tuple[Row, ...] = ()
    ratios: tuple[Ratio, ...] = ()

    def __add__(self, other: Results) -> Results:
        return Results(rows=self.rows + other.rows, ratios=self.ratios + other.ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is printed and written: where it was measured, and what was found."""

    environment: dict[str, Any]
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]

    def to_json(self) -> bytes:
        """One JSON object of `environment`, `rows` and `ratios`. Raises ValueError for a value that is not finite."""
        return json.dumps(asdict(self), indent=1, allow_nan=False).encode() + b"\n"


def interleave(candidates: Mapping[str, Callable[[], T]], repeats: int, *, warm_up: bool = True) -> dict[str, list[T]]:
    """Call every candidate once per round, in the order given, over `repeats` rounds and a warm-up round before them;
    none before candidates that are processes of their own, which are as cold the second time.

    Returns what the counted calls returned, by candidate. Raises ValueError for fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: must be at least 1")
    results: dict[str, list[T]] = {name: [] for name in candidates}
    for round_number in range(-1 if warm_up else 0, repeats):
        for name, candidate in candidates.items():
            result = candidate()
            if round_number >= 0:
                results[name].append(result)
    return results


def measure(
    candidates: Mapping[str, Callable[[], float | None]], repeats: int, clock: Clock = time.process_time
) -> dict[str, Spread]:
    """Seconds that each candidate takes by `clock`, or those that it returns if it takes the time itself.

    The default clock counts CPU seconds of this process, all threads: what other processes do counts little there.
    """
    timed = {name: _timed(candidate, clock) for name, candidate in candidates.items()}
    return {name: Spread.of(seconds) for name, seconds in interleave(timed, repeats).items()}


def _timed(candidate: Callable[[], float | None], clock: Clock) -> Callable[[], float]:
    def run() -> float:
        begin = clock()
        own = candidate()
        return clock() - begin if own is None else own

    return run


def row(case: str, candidate: str, spread: Spread, unit: str, **counts: int | float) -> Row:
    """A row of a measured candidate."""
    return Row(case=case, candidate=candidate, value=spread.median, unit=unit, **asdict(spread), counts=counts)


def absent(case: str, candidate: str, unit: str) -> Row:
    """A row of a candidate that is not installed here."""
    return Row(case=case, candidate=candidate, value=None, unit=unit, median=None, low=None, high=None)


def ratio(figure: str, numerator: Row, denominator: Row) -> Ratio:
    """The ratio of two rows; no value where one is absent."""
    value = None
    if numerator.value is not None and denominator.value is not None:
        value = numerator.value / denominator.value
    return Ratio(figure=figure, value=value, numerator=numerator.name, denominator=denominator.name)


def count_ratio(figure: str, of: Row, numerator: str, denominator: str) -> Ratio:
    """The ratio of two counts of one row."""
    value = of.counts[numerator] / of.counts[denominator]
    return Ratio(figure=figure, value=value, numerator=f"{of.name}:{numerator}", denominator=f"{of.name}:{denominator}")


def chosen_peers(known: Sequence[str], against: Sequence[str]) -> tuple[str, ...]:
    """The peers to measure: those asked for, all known ones by default. Raises ValueError for an unknown one."""
    if unknown := [peer for peer in against if peer not in known]:
        raise ValueError(f"against is {', '.join(unknown)}: the peers are {', '.join(known) or 'none'}")
    return tuple(peer for peer in known if not against or peer in against)


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, None where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(peers: Sequence[str] = ()) -> dict[str, Any]:
    """Where and when this is measured. load: how busy the machine was before the run."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": load(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {package: installed_version(package) for package in (*PACKAGES, *peers)},
        "threads": {name: os.environ.get(name) for name in THREAD_VARIABLES},
    }


def load() -> list[float]:
    """The machine's load averages over 1, 5 and 15 minutes: processes that run or want to."""
    return [round(value, 2) for value in os.getloadavg()]


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as the kernel gives it."""
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def show(report: Report, console: Console) -> None:
    """Print the rows and ratios as tables."""
    rows = Table("case", "candidate", title="Measured: median of the repeats, lowest and highest")
    for heading in ("value", "low", "high"):
        rows.add_column(heading, justify="right")
    rows.add_column("unit")
    rows.add_column("counts")
    for r in report.rows:
        counts = ", ".join(f"{name} {quantity(count)}" for name, count in r.counts.items())
        said = "; ".join(filter(None, (counts, r.note)))
        rows.add_row(r.case, r.candidate, *map(quantity, (r.value, r.low, r.high)), r.unit, said)
    console.print(rows)
    ratios = Table("figure", title="Ratios")
    ratios.add_column("value", justify="right")
    ratios.add_column("of")
    for each in report.ratios:
        value = "absent" if each.value is None else f"{each.value:.3f}"
        ratios.add_row(each.figure, value, f"{each.numerator} ÷ {each.denominator}")
    console.print(ratios)


def quantity(value: float | None) -> str:
    """A number for people: exact where it is a count, else of three digits or so, in thousands (K), millions (M) or
    thousand millions (G)."""
    if value is None:
        return "absent"
    if isinstance(value, int):
        return f"{value:,}"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(value) >= limit:
            scaled = value / (1e3 if letter == "K" else limit)
            return f"{scaled:,.1f} {letter}"
    return f"{value:.4g}"
