"""What `seqmesh plan` shows of the steps it planned: a table in the terminal, the same on a page of its own."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from seqmesh.loader.settings import LoaderSettings
from seqmesh.packer.cost import CostModel
from seqmesh.tools import pages
from seqmesh.tools.output import print_whole

LISTED_STEPS = 32
NOTHING = "-"
NOTES = (
    "gap: time over the lower bound, which no plan beats; imbalance: time over the mean rank's work",
    "micro-batches: of the rank with the fewest and of the one with the most; fill: tokens over what all of them hold",
)
SENT_BYTES_NOTE = "sent: what ranks get from others for their rings: keys and values twice, and their gradients"
SENT_ROWS_NOTE = "sent: rows of keys and values that ranks get from others for their rings, for one attention"
STATIC_NOTE = (
    "of static: over what ranks would get if every document were on {} ranks, as many as the longest one needs"
)
NO_STATIC_NOTE = "of static: nothing would be sent there, since one rank holds the longest document"
Fold = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step. fewest, most, micro_batches: of a rank, and of all. ring_sizes: how many rings there are of each size;
    rings_across: those that leave a node. sent_rows, static_rows: of keys and values that ranks get from others for one
    attention. milliseconds: of planning."""

    step: int
    epoch: int
    documents: int
    tokens: int
    makespan: int
    lower_bound: int
    gap: float
    imbalance: float
    fewest: int
    most: int
    micro_batches: int
    fill: float
    rings: int
    ring_sizes: dict[int, int]
    rings_across: int
    sent_rows: int
    static_rows: int
    of_static: float | None
    sent_bytes: int | None
    seconds: float | None
    milliseconds: float

    @property
    def largest_ring(self) -> int:
        return max(self.ring_sizes, default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Steps of one set. documents, tokens: of the whole set. static_ring: ranks that its longest document needs. ended:
    whether the data ended before as many steps as were asked for."""

    settings: LoaderSettings
    cost: CostModel
    documents: int
    tokens: int
    static_ring: int
    ended: bool
    results: tuple[StepResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """title; the values of a step that it shows, how, and which of several steps' values are the worst (none: there is
    no better and worse)."""

    title: str
    fields: tuple[str, ...]
    show: Callable[..., str]
    worst: tuple[Fold, ...] = ()


COLUMNS = (
    Column(title="docs", fields=("documents",), show="{:,.0f}".format),
    Column(title="tokens", fields=("tokens",), show="{:,.0f}".format),
    Column(title="gap", fields=("gap",), show="{:.2%}".format, worst=(max,)),
    Column(title="imbalance", fields=("imbalance",), show="{:.4f}".format, worst=(max,)),
    Column(title="micro-batches", fields=("fewest", "most"), show="{:.0f} to {:.0f}".format, worst=(min, max)),
    Column(title="fill", fields=("fill",), show="{:.1%}".format, worst=(min,)),
    Column(title="rings", fields=("rings",), show="{:,.0f}".format, worst=(max,)),
    Column(title="largest", fields=("largest_ring",), show="{:,.0f}".format, worst=(max,)),
    Column(title="of static", fields=("of_static",), show="{:.2%}".format, worst=(max,)),
    Column(title="plan ms", fields=("milliseconds",), show="{:,.1f}".format, worst=(max,)),
)
SENT = Column(title="sent GB", fields=("sent_bytes",), show=lambda count: _short(count / 1e9), worst=(max,))
SENT_ROWS = Column(title="sent rows", fields=("sent_rows",), show="{:,.0f}".format, worst=(max,))
SECONDS = Column(title="step s", fields=("seconds",), show="{:,.3f}".format, worst=(max,))


def print_report(console: Console, found: PlanReport) -> None:
    """What was planned, what it costs, the table, and what its columns mean."""
    for line in heading(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    titles, *rows = table_rows(found)
    table = Table(title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    print_whole(console, table)
    for note in notes(found):
        console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)


def heading(found: PlanReport) -> list[str]:
    """The data, the mesh, the price of a micro-batch."""
    settings = found.settings
    nodes = "" if found.settings.ranks_per_node is None else f", {found.settings.ranks_per_node:,} to a node"
    return [
        f"{settings.data}: {found.documents:,} documents, {found.tokens:,} tokens",
        f"steps of at most {settings.tokens_per_step:,} tokens on {settings.ranks:,} ranks of {settings.capacity:,}"
        f"{nodes}, mode {settings.mode}",
        f"a micro-batch costs {price(found.cost)}",
        crossing(found.cost),
    ]


def price(cost: CostModel) -> str:
    """The formula of a micro-batch with its coefficients."""
    pairs = f"{cost.quadratic:,} · pairs"
    if not cost.row_near and not cost.row_far:
        return f"{cost.fixed:,} + {cost.linear:,} · tokens + {pairs}"
    rows = f"{cost.row_near:,} · rows"
    if cost.row_far != cost.row_near:
        rows += f" ({cost.row_far:,} where a ring leaves a node)"
    return f"{cost.fixed:,} + {cost.linear:,} · tokens + the larger of {pairs} and {rows}"


def crossing(cost: CostModel) -> str:
    """Where attention overtakes everything else."""
    seen = [window for window in cost.windows if window is not None]
    layers = "" if len(seen) == len(cost.windows) else " in some layers"
    window = f"; a token sees {max(seen):,} keys at most{layers}" if seen else ""
    if cost.crossover == float("inf"):
        return f"attention costs less than the rest in documents of any length{window}"
    return f"attention costs as much as the rest in a document of {cost.crossover:,.0f} tokens{window}"


def table_rows(found: PlanReport) -> list[list[str]]:
    """Titles; the steps, unless they are too many to list; of several steps the median and the worst."""
    columns = _columns(found.results)
    rows = [["step", *(column.title for column in columns)]]
    if len(found.results) <= LISTED_STEPS:
        rows += [[f"{step.step:,}", *(_folded(column, [step]) for column in columns)] for step in found.results]
    if len(found.results) > 1:
        rows.append(["median", *(_folded(column, found.results) for column in columns)])
        rows.append(["worst", *(_folded(c, found.results, c.worst) if c.worst else "" for c in columns)])
    return rows


def _columns(results: Sequence[StepResult]) -> list[Column]:
    """Bytes and seconds only where they are known."""
    columns = list(COLUMNS)
    columns.insert(-2, SENT_ROWS if results[0].sent_bytes is None else SENT)
    return columns if results[0].seconds is None else [*columns, SECONDS]


def _folded(column: Column, results: Sequence[StepResult], folds: Sequence[Fold] = ()) -> str:
    """A cell: the column's values in these steps, each folded into one, their medians where nothing else is said."""
    held = [[value for step in results if (value := getattr(step, name)) is not None] for name in column.fields]
    if not all(held):
        return NOTHING
    return column.show(*(fold(values) for fold, values in zip(folds or (median,) * len(held), held, strict=True)))


def _short(gigabytes: float) -> str:
    return f"{gigabytes:,.0f}" if gigabytes >= 1000 else f"{gigabytes:,.1f}"


def notes(found: PlanReport) -> list[str]:
    """Ring sizes, what columns mean, and what is left out."""
    sent = SENT_ROWS_NOTE if found.results[0].sent_bytes is None else SENT_BYTES_NOTE
    static = NO_STATIC_NOTE if found.static_ring == 1 else STATIC_NOTE.format(f"{found.static_ring:,}")
    explained = [*NOTES, sent, static]
    if len(found.results) > LISTED_STEPS:
        explained.append(f"{len(found.results):,} steps: --json lists each")
    if found.ended:
        explained.append(f"the data ends with step {found.results[-1].step:,}: choose more --epochs to go on")
    return [ring_line(found), *explained]


def ring_line(found: PlanReport) -> str:
    """How many rings of each size there are in all steps."""
    sizes: Counter[int] = Counter()
    for step in found.results:
        sizes.update(step.ring_sizes)
    if not sizes:
        return "rings: none, every document is whole on a rank"
    across = sum(step.rings_across for step in found.results)
    nodes = "" if found.settings.ranks_per_node is None else f" ({across:,} leave their node)"
    return f"rings{nodes}: " + ", ".join(f"{sizes[size]:,} of {size:,} ranks" for size in sorted(sizes))


def page(found: PlanReport, picture: bytes, kind: str) -> bytes:
    """One HTML file that needs nothing else: text, picture (`svg` or `png`), table."""
    titles, *rows = table_rows(found)
    body = [
        *(f"<div>{escape(line)}</div>" for line in heading(found)),
        _figure(picture, kind),
        *pages.table(titles, rows),
        *(f'<div class="note">{escape(note)}</div>' for note in notes(found)),
    ]
    return pages.page("seqmesh plan", body)


def _figure(picture: bytes, kind: str) -> str:
    if kind == "svg":
        text = picture.decode()
        return text[text.index("<svg") :]  # not the XML prologue
    return f'<img alt="ranks over time" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'


def described(cost: CostModel) -> dict[str, Any]:
    """The cost model for JSON, which knows no infinity."""
    crossover = None if cost.crossover == float("inf") else cost.crossover
    return {name: getattr(cost, name) for name in cost.__dataclass_fields__} | {"crossover": crossover}
