"""What `seqmesh pack` shows: a table of methods, and the same as a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqmesh.loader.files import atomic_path
from seqmesh.tools.output import print_whole

DOT, GUIDE = "#1f4e79", "#dddddd"
SHORT_FROM = 1_000_000
NOTES = (
    "over: bins more than the bound (Martello and Toth's L2), under which no packing of the same pieces gets",
    "attention: (query, key) pairs inside pieces, over those of the documents in one piece",
    "dearest: the work of the dearest bin over that of the mean bin, for a model of 8 thousand million parameters",
)
WAITING_NOTE = "steps: time over work where {} bins in a row make a step that lasts as long as its dearest bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """What one method does with the documents. attention: pairs that are left, over those of whole documents.
    imbalance: work of the dearest bin over the mean bin's. waiting: time over work in steps. seconds: of CPU."""

    method: str
    bins: int
    bound: int
    fill: float
    tokens: int
    cut_tokens: int
    split_documents: int
    attention: float
    imbalance: float
    waiting: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Methods on the same documents, `overlong` of which a bin does not hold in one piece."""

    documents: int
    tokens: int
    capacity: int
    overlong: int
    policy: str
    rows_per_step: int | None
    results: tuple[MethodResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One panel of the picture: a percentage of each method."""

    title: str
    of: Callable[[MethodResult], float]


def print_comparison(console: Console, found: Comparison, folder: Path) -> None:
    """The documents, the table, and what its columns mean."""
    policy = "cut where a bin ends" if found.policy == "error" else found.policy  # refused, unless all is cut
    overlong = f", {found.overlong:,} of them longer than a bin: {policy}" if found.overlong else ""
    console.print(Text(f"{folder}: {found.documents:,} documents, {found.tokens:,} tokens{overlong}"), soft_wrap=True)
    print_whole(console, comparison_table(found))
    notes = NOTES if found.rows_per_step is None else (*NOTES, WAITING_NOTE.format(found.rows_per_step))
    for note in notes:
        console.print(note, style="dim", highlight=False, soft_wrap=True)


def comparison_table(found: Comparison) -> Table:
    """One row for each method."""
    title = f"bins of {found.capacity:,} tokens"
    table = Table("method", title=title, title_justify="left", box=SIMPLE, padding=0, show_edge=False)
    columns = _columns(found)
    for name in columns:
        table.add_column(name, justify="right")
    for result in found.results:
        table.add_row(result.method, *(show(result) for show in columns.values()))
    return table


def _columns(found: Comparison) -> dict[str, Callable[[MethodResult], str]]:
    """What is said of a method, by the name of its column."""
    columns: dict[str, Callable[[MethodResult], str]] = {
        "bins": lambda result: f"{result.bins:,}",
        "over": lambda result: f"{result.bins - result.bound:+,}",
        "fill": lambda result: f"{result.fill:.2%}",
        "tokens\ncut": lambda result: _short(result.cut_tokens),
        "docs\nsplit": lambda result: f"{result.split_documents:,}",
        "attention": lambda result: f"{result.attention:.1%}",
        "dearest": lambda result: f"{result.imbalance:.2f}",
    }
    if found.rows_per_step is not None:
        columns["steps"] = lambda result: f"{result.waiting or 0:.2f}"
    return columns | {"CPU s": lambda result: f"{result.seconds:.3f}"}


def _short(count: int) -> str:
    return f"{count:,}" if count < SHORT_FROM else f"{count / 1e6:,.2f}M"


def draw(found: Comparison, path: Path) -> None:
    """Fill and work by method, side by side, in the format of the file's name; the file appears whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measures = _measures(found)
    height = 1.4 + 0.36 * len(found.results)
    figure, axes = pyplot.subplots(1, len(measures), figsize=(11, height), sharey=True, layout="constrained")
    for axis, measure in zip(axes, measures, strict=True):
        _draw_panel(axis, [measure.of(result) for result in found.results], measure.title)
    axes[0].set_yticks(range(len(found.results)), [result.method for result in found.results])
    axes[0].invert_yaxis()
    figure.suptitle(
        f"{found.documents:,} documents, {found.tokens:,} tokens, in bins of {found.capacity:,}", x=0.01, ha="left"
    )
    try:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=120, format=path.suffix.removeprefix(".") or "png")
    finally:
        pyplot.close(figure)


def _measures(found: Comparison) -> list[Measure]:
    measures = [
        Measure(title="fill, %\n(more is better)", of=lambda result: 100 * result.fill),
        Measure(title="attention work\n(whole documents: 100)", of=lambda result: 100 * result.attention),
        Measure(title="work of the dearest bin\n(mean bin: 100)", of=lambda result: 100 * result.imbalance),
    ]
    if found.rows_per_step is not None:
        title = f"time of steps of {found.rows_per_step} bins\n(without waiting: 100)"
        measures.append(Measure(title=title, of=lambda result: 100 * (result.waiting or 0)))
    return measures


def _draw_panel(axis: Any, values: list[float], title: str) -> None:
    """A dot for each method, with its value instead of an axis: some panels show small differences of large numbers."""
    span = max(max(values) - min(values), 0.05 * max(values), 0.1)
    axis.hlines(range(len(values)), min(values) - span / 10, max(values) + span / 2, color=GUIDE, linewidth=1)
    axis.plot(values, range(len(values)), "o", color=DOT, markersize=6)
    for row, value in enumerate(values):
        axis.annotate(f"{value:.1f}", (value, row), (7, 5), textcoords="offset points", va="center", fontsize="small")
    axis.set_xlim(min(values) - span / 10, max(values) + span / 2)
    axis.set_ylim(-0.6, len(values) - 0.4)
    axis.set_xticks([])
    axis.set_title(title, loc="left", fontsize="medium")
    axis.spines[:].set_visible(False)
    axis.tick_params(axis="y", length=0)
