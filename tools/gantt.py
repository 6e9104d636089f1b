"""The picture of a step plan: ranks from top to bottom, time from left to right, waiting in white.

A few ranks get a bar for each piece, with one colour for all members of a ring. Many ranks get an image with a row for
each rank, coloured by kind: the sizes of rings in doubling classes, documents that are whole, waiting.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.plan import StepPlan

BARS_UP_TO = 64  # ranks
TICKS_UP_TO = 32  # ranks with a number each
LEGEND = {"fontsize": "small", "frameon": False}
RING_COLORS = (
    *("#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#e6ab02"),
    *("#1f78b4", "#a6761d", "#b2182b", "#542788", "#01665e"),
)
WHOLE_COLORS = ("#c3ccd6", "#dde3e9")  # micro-batches take turns
BOUND_COLOR, NODE_COLOR, EDGE_COLOR = "#111111", "#7f8c99", "#9aa7b3"
IDLE, WHOLE = -1, 0  # kinds; from 1 on: classes of ring sizes
COLUMNS = 1_600
LABEL_SHARE = 0.035  # of the picture's width: narrower bars have no words
DPI = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A plan and how to show it. node: ranks of one node. units_per_second: None where no machine is known; then time
    is counted in lower bounds."""

    plan: StepPlan
    title: str
    node: int
    units_per_second: float | None = None

    @property
    def unit(self) -> float:
        """Cost units of one tick of the clock."""
        return self.units_per_second or float(max(self.plan.lower_bound, 1))

    @property
    def clock(self) -> str:
        return "seconds" if self.units_per_second else "time (lower bound = 1)"

    @property
    def end(self) -> float:
        return max(self.plan.makespan, self.plan.lower_bound, 1) / self.unit


def is_drawn_in_bars(plan: StepPlan) -> bool:
    """Whether each piece has a bar of its own, rather than each rank a row of pixels."""
    return plan.ranks <= BARS_UP_TO


def render(scene: Scene, kind: str) -> bytes:
    """The picture as `png` or `svg`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = _draw_bars(pyplot, scene) if is_drawn_in_bars(scene.plan) else _draw_image(pyplot, scene)
    buffer = io.BytesIO()
    try:
        figure.savefig(buffer, dpi=DPI, format=kind)
    finally:
        pyplot.close(figure)
    return buffer.getvalue()


def bar_colors(plan: StepPlan) -> list[str]:
    """Of each piece: its ring's, or one of the quiet ones. Rings that begin one after the other differ."""
    numbers = ring_numbers(plan)
    return [
        WHOLE_COLORS[wave % len(WHOLE_COLORS)] if number < 0 else RING_COLORS[number % len(RING_COLORS)]
        for number, wave in zip(numbers.tolist(), plan.wave.tolist(), strict=True)
    ]


def ring_numbers(plan: StepPlan) -> Int64Array:
    """Of each piece: the number of its ring in the order in which rings begin, -1 for a document that is whole."""
    in_ring = plan.ring_size > 1
    rings, first = np.unique(plan.document[in_ring], return_index=True)
    number = np.full(len(plan.lengths), -1)
    number[rings[np.lexsort((rings, plan.begins[in_ring][first]))]] = np.arange(len(rings))
    return np.asarray(np.where(in_ring, number[plan.document], -1), np.int64)


def piece_begins(plan: StepPlan) -> Int64Array:
    """Where each piece is drawn: one after the other from the begin of their micro-batch. What is left of that is
    waiting for a rank with a longer one that shares a ring."""
    if not len(plan.costs):
        return plan.costs
    first = np.append(True, (np.diff(plan.rank) != 0) | (np.diff(plan.wave) != 0))
    before = np.cumsum(plan.costs) - plan.costs
    return np.asarray(plan.begins + before - before[first][np.cumsum(first) - 1], np.int64)


def size_classes(ring_sizes: Int64Array) -> Int64Array:
    """0 for 1, 1 for 2, 2 for 3 and 4, 3 for 5 to 8, ...: exact for sizes up to 2**53."""
    mantissa, exponent = np.frexp(ring_sizes.astype(np.float64))
    return np.asarray(exponent - (mantissa == 0.5), np.int64)


def class_name(number: int) -> str:
    """The ring sizes of a class."""
    low, high = (1 << number >> 1) + 1, 1 << number
    return f"rings of {low}" if low == high else f"rings of {low} to {high}"


def kinds(plan: StepPlan, columns: int) -> Int64Array:
    """What each rank does in the middle of each of so many equal parts of the step [ranks, columns]."""
    image = np.full((plan.ranks, columns), IDLE)
    times = (np.arange(columns) + 0.5) * (plan.makespan / columns)
    begins, classes = piece_begins(plan), size_classes(plan.ring_size)
    ends = begins + plan.costs
    borders = np.searchsorted(plan.rank, np.arange(plan.ranks + 1))
    for rank in np.flatnonzero(np.diff(borders)):
        own = slice(borders[rank], borders[rank + 1])
        at = np.searchsorted(begins[own], times, side="right") - 1
        busy = (at >= 0) & (times < ends[own][at])
        image[rank] = np.where(busy, classes[own][at], IDLE)
    return image


def _draw_bars(pyplot: Any, scene: Scene) -> Any:
    plan, colors = scene.plan, np.array(bar_colors(scene.plan), dtype=object)
    begins = piece_begins(plan)
    figure, axis = pyplot.subplots(figsize=(12, 1.7 + plan.ranks * min(0.55, 12 / plan.ranks)), layout="constrained")
    for rank in range(plan.ranks):
        own = np.flatnonzero(plan.rank == rank)
        spans = np.stack([begins[own], plan.costs[own]], axis=1) / scene.unit
        axis.broken_barh(spans, (rank - 0.42, 0.84), facecolors=colors[own], edgecolor=EDGE_COLOR, linewidth=0.3)
    if plan.ranks <= TICKS_UP_TO:
        axis.set_yticks(range(plan.ranks))
    _label_rings(axis, scene)
    _finish(axis, scene)
    handles = _handles(scene, [("whole documents, micro-batches in turns", WHOLE_COLORS[0])])
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), **LEGEND)
    words = "other colours: a ring each, tokens of its document ÷ ranks"
    axis.set_title(words, loc="right", fontsize="small")
    return figure


def _label_rings(axis: Any, scene: Scene) -> None:
    """Tokens and ring size, in the bars of rings that are wide enough."""
    plan, begins = scene.plan, piece_begins(scene.plan)
    wide = plan.costs / scene.unit > LABEL_SHARE * scene.end
    for piece in np.flatnonzero(wide & (plan.ring_size > 1)):
        middle = (begins[piece] + plan.costs[piece] / 2) / scene.unit
        words = f"{plan.lengths[plan.document[piece]] / 1e3:.0f}k÷{plan.ring_size[piece]}"
        axis.text(middle, plan.rank[piece], words, ha="center", va="center", fontsize=7, color="white")


def _draw_image(pyplot: Any, scene: Scene) -> Any:
    image = kinds(scene.plan, COLUMNS)
    figure, axis = pyplot.subplots(figsize=(12, 9), layout="constrained")
    most = max(int(size_classes(scene.plan.ring_size).max(initial=0)), 1)
    shades = ["#ffffff", WHOLE_COLORS[0], *_shades(pyplot, most)]
    rgb = np.array([_rgb(pyplot, shade) for shade in shades], np.float64)[image - IDLE]
    extent = (0, scene.plan.makespan / scene.unit, scene.plan.ranks - 0.5, -0.5)
    axis.imshow(rgb, extent=extent, aspect="auto", interpolation="antialiased")
    _finish(axis, scene)
    present = [number for number in np.unique(image).tolist() if number > WHOLE]
    entries = [("whole documents", WHOLE_COLORS[0]), *((class_name(n), shades[n - IDLE]) for n in present)]
    axis.legend(handles=_handles(scene, entries), loc="upper left", bbox_to_anchor=(1, 1), **LEGEND)
    return figure


def _shades(pyplot: Any, classes: int) -> list[Any]:
    """From yellow to dark blue with the size of rings."""
    shades: list[Any] = list(pyplot.get_cmap("plasma_r")(np.linspace(0.1, 1, classes)))
    return shades


def _rgb(pyplot: Any, color: Any) -> npt.NDArray[np.float64]:
    return np.asarray(pyplot.matplotlib.colors.to_rgb(color), np.float64)


def _finish(axis: Any, scene: Scene) -> None:
    """What both pictures have: the axes, the nodes, the bound."""
    plan = scene.plan
    for rank in range(scene.node, plan.ranks, scene.node):
        axis.axhline(rank - 0.5, color=NODE_COLOR, linewidth=0.8 if is_drawn_in_bars(plan) else 0.15)
    axis.axvline(plan.lower_bound / scene.unit, color=BOUND_COLOR, linestyle="--", linewidth=1)
    axis.set_xlim(0, scene.end * 1.01)
    axis.set_ylim(plan.ranks - 0.5, -0.5)
    axis.set_xlabel(scene.clock)
    axis.set_ylabel("rank")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.figure.suptitle(scene.title, x=0.01, ha="left")


def _handles(scene: Scene, entries: Sequence[tuple[str, Any]]) -> list[Any]:
    """What the legend explains: fills by name, and what both pictures have."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=color, label=name) for name, color in entries]
    handles.append(Patch(facecolor="white", edgecolor=NODE_COLOR, label="waiting"))
    handles.append(Line2D([], [], color=BOUND_COLOR, linestyle="--", linewidth=1, label="lower bound"))
    if scene.node < scene.plan.ranks:
        handles.append(Line2D([], [], color=NODE_COLOR, linewidth=0.8, label="between nodes"))
    return handles
