"""`seqmesh plan`: the plans of one or many steps of a shard set, as numbers and as a picture of ranks over time.

Documents come in the order in which the loader serves them, and the plan is the one that it makes; no token is read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from seqmesh.loader.feed import Feed
from seqmesh.loader.files import atomic_write
from seqmesh.loader.manifest import read_manifest
from seqmesh.loader.settings import LoaderSettings, make_settings
from seqmesh.loader.stream import StreamState, draw
from seqmesh.packer.lengths import Int64Array
from seqmesh.packer.mesh import plan_step
from seqmesh.packer.pieces import piece_rows, smallest_rings
from seqmesh.packer.plan import Mesh, StepPlan, leaves_node
from seqmesh.tools.gantt import Scene, is_drawn_in_bars, render
from seqmesh.tools.output import check_folders, identity, print_written
from seqmesh.tools.plan_costs import CostOptions, Prices, prices_of
from seqmesh.tools.plan_report import PlanReport, StepResult, described, page, print_report

PICTURES = (".png", ".html")


def run(
    *,
    folder: Path,
    first_step: int = 0,
    steps: int = 1,
    costs: CostOptions | None = None,
    json_path: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
    **fields: Any,
) -> PlanReport:
    """The whole command. `fields` are those of `LoaderSettings`, without data and cost.

    Raises ValueError or OSError before anything is planned where settings, data or an output are unfit. The picture is
    of the first step that is planned.
    """
    console = console or Console()
    check_range(first_step, steps)
    check_folders(json_path, plot)
    check_picture(plot)
    prices = prices_of(costs or CostOptions())
    settings = make_settings({"epochs": 1, "seed": 0} | fields | {"data": str(folder), "cost": prices.cost})
    feed, mesh = Feed(settings), settings.mesh
    with console.status("planning ..."):
        plan, found = plan_steps(feed, mesh, prices, range(first_step, first_step + steps))
    print_report(console, found)
    if json_path is not None:
        atomic_write(json_path, to_json(identity(folder, read_manifest(folder)), found))
    if plot is not None:
        atomic_write(plot, drawn(plan, found, mesh, prices, plot.suffix))
    print_written(console, json_path, plot)
    return found


def check_range(first_step: int, steps: int) -> None:
    """Raises ValueError for what can not be counted."""
    if first_step < 0:
        raise ValueError(f"first_step is {first_step}: must be at least 0")
    if steps < 1:
        raise ValueError(f"steps is {steps}: must be at least 1")


def check_picture(plot: Path | None) -> None:
    """Raises ValueError for a name that does not tell what to draw."""
    if plot is not None and plot.suffix not in PICTURES:
        raise ValueError(f"cannot draw {plot}: its name must end in {' or '.join(PICTURES)}")


def plan_steps(feed: Feed, mesh: Mesh, prices: Prices, numbers: range) -> tuple[StepPlan, PlanReport]:
    """The plan of the first step, and what is to be said of all. Raises ValueError where the data has no such step."""
    static_ring = longest_ring(feed.shards.lengths, feed.settings)
    first, results = None, []
    for state, lengths in islice(global_batches(feed), numbers.start, numbers.stop):
        if first is None:
            plan_step(lengths, mesh, prices.cost)  # compiling is not counted in the time
        begin = time.perf_counter()
        plan = plan_step(lengths, mesh, prices.cost)
        milliseconds = 1e3 * (time.perf_counter() - begin)
        first = first or plan
        results.append(measured(plan, mesh, prices, static_ring, state=state, milliseconds=milliseconds))
    if first is None:
        raise ValueError(_too_late(feed, numbers.start))
    return first, PlanReport(
        settings=feed.settings,
        cost=prices.cost,
        documents=len(feed.shards),
        tokens=int(feed.shards.lengths.sum()),
        static_ring=static_ring,
        ended=len(results) < len(numbers),
        results=tuple(results),
    )


def global_batches(feed: Feed) -> Iterator[tuple[StreamState, Int64Array]]:
    """The stream's state before each step, and the lengths of the step's documents."""
    state = feed.start
    while (drawn := draw(state, feed.shards.lengths, feed.settings, feed.sources)) is not None:
        documents, after = drawn
        yield state, documents.length
        state = after


def measured(
    plan: StepPlan, mesh: Mesh, prices: Prices, static_ring: int, *, state: StreamState, milliseconds: float
) -> StepResult:
    """What there is to say of one plan."""
    rings = np.diff(plan.ring_offsets)
    sizes, counts = np.unique(rings[rings > 1], return_counts=True)
    micro_batches = int(plan.waves.sum())
    windows = prices.cost.windows
    rows = sum(n * received_rows(plan, window) for window, n in windows.items()) // windows.total()
    static = sum(n * static_rows(plan.lengths, static_ring, window) for window, n in windows.items()) // windows.total()
    return StepResult(
        step=state.step,
        epoch=state.epoch,
        documents=len(plan.lengths),
        tokens=plan.tokens,
        makespan=plan.makespan,
        lower_bound=plan.lower_bound,
        gap=plan.gap,
        imbalance=plan.imbalance,
        fewest=int(plan.waves.min()),
        most=int(plan.waves.max()),
        micro_batches=micro_batches,
        fill=plan.tokens / max(micro_batches * mesh.capacity, 1),
        rings=plan.rings,
        ring_sizes=dict(zip(sizes.tolist(), counts.tolist(), strict=True)),
        rings_across=int(leaves_node(plan.ring_ranks, plan.ring_offsets, mesh.node).sum()),
        sent_rows=rows,
        static_rows=static,
        of_static=rows / static if static else None,
        sent_bytes=None if prices.row_bytes is None else rows * prices.row_bytes,
        seconds=None if prices.units_per_second is None else plan.makespan / prices.units_per_second,
        milliseconds=milliseconds,
    )


def longest_ring(lengths: Int64Array, settings: LoaderSettings) -> int:
    """Ranks that the longest document that is served needs: the degree of a static mesh."""
    dropped = settings.overlong == "drop"
    served = lengths[lengths <= settings.longest] if dropped else np.minimum(lengths, settings.longest)
    return int(smallest_rings(np.array([served.max()]), settings.capacity)[0])


def received_rows(plan: StepPlan, window: int | None) -> int:
    """Rows of keys and values that ranks get from others, for one attention over all rings."""
    return int(piece_rows(plan.lengths[plan.document], plan.ring_size, plan.ring_index, window).sum())


def static_rows(lengths: Int64Array, ring_size: int, window: int | None) -> int:
    """The same if every document were on a ring of this size, cut in the same way."""
    sizes = np.full_like(lengths, ring_size)
    indices = (np.full_like(lengths, index) for index in range(ring_size))
    return sum(int(piece_rows(lengths, sizes, index, window).sum()) for index in indices)


def to_json(data: dict[str, Any], found: PlanReport) -> bytes:
    """Everything that is in the table, step by step, and what was asked for, as indented JSON."""
    settings = asdict(found.settings)
    del settings["cost"]
    steps = [asdict(step) for step in found.results]
    report = {"data": data, "settings": settings, "cost": described(found.cost), "static_ring": found.static_ring}
    return json.dumps(report | {"ended": found.ended, "steps": steps}, indent=1).encode() + b"\n"


def drawn(plan: StepPlan, found: PlanReport, mesh: Mesh, prices: Prices, suffix: str) -> bytes:
    """The file of the picture: the picture alone, or a page with it."""
    step = found.results[0]
    took = "" if step.seconds is None else f"{step.seconds:,.3f} s, "
    title = f"step {step.step:,}: {step.documents:,} documents, {step.tokens:,} tokens on {plan.ranks:,} ranks"
    scene = Scene(
        plan=plan,
        title=f"{title}; {took}{step.gap:.2%} over the lower bound",
        node=mesh.node,
        units_per_second=prices.units_per_second,
    )
    if suffix == ".png":
        return render(scene, "png")
    kind = "svg" if is_drawn_in_bars(plan) else "png"
    return page(found, render(scene, kind), kind)


def _too_late(feed: Feed, first_step: int) -> str:
    count = sum(1 for _ in global_batches(feed))
    epochs = feed.settings.epochs
    return (
        f"first_step is {first_step}: {epochs} {'epoch has' if epochs == 1 else 'epochs have'} {count} steps (from 0)"
    )
