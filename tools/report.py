"""`seqmesh report`: what a training run did, as a table and as a picture. Reads the run's log; changes nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from seqmesh.trainer.monitor import read_steps

PICTURE = "report.png"
PHASES = ("data", "compute", "reduce", "update", "save")
COLORS = ("#d95f02", "#1b9e77", "#7570b3", "#a6761d", "#666666")

Records = Sequence[dict[str, Any]]


def run(*, folder: Path, console: Console | None = None) -> Path:
    """The whole command; returns the picture's path. Raises FileNotFoundError or ValueError where there is no run."""
    console = console or Console()
    log = folder / "log.jsonl"
    if not log.is_file():
        raise FileNotFoundError(f"{folder} holds no training run: it has no log.jsonl")
    records = list(read_steps(log).values())
    if not records:
        raise ValueError(f"{log} holds no step yet")
    console.print(summary_table(records))
    picture = draw(records, folder / PICTURE)
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    return picture


def summary_table(records: Records) -> Table:
    """First and last loss, medians of the rest."""
    last = records[-1]
    total = sum(record["total"] for record in records)
    rows = {
        "steps": f"{last['step']:,}",
        "tokens": f"{sum(record['tokens'] for record in records):,}",
        "loss": f"{records[0]['loss']:.3f} → {last['loss']:.3f}",
        "tokens/s (median)": f"{median(record['tokens_per_second'] for record in records):,.0f}",
        "fill": f"{median(record['fill'] for record in records):.1%}",
        "imbalance": f"{median(record['imbalance'] for record in records):.4f}",
        "documents in rings": f"{sum(record['rings'] for record in records):,}",
        "sent for rings, first rank": f"{sum(record['ring_bytes'] for record in records) / 2**20:,.1f} MiB",
    }
    for phase in PHASES:
        rows[f"time in {phase}"] = f"{sum(record['seconds'].get(phase, 0.0) for record in records) / total:.1%}"
    if skipped := sum(not record["updated"] for record in records):
        rows["updates skipped"] = f"{skipped:,}"
    table = Table(show_header=False, title="training run", title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def draw(records: Records, path: Path) -> Path:
    """Loss and throughput over the steps, and where each step's time went, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [record["step"] for record in records]
    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    top.plot(steps, [record["loss"] for record in records], color="#1f4e79", marker="o", markersize=3)
    top.set_ylabel("loss (nats/token)")
    top.set_title(f"{sum(record['tokens'] for record in records):,} tokens in {len(records)} steps", loc="left")
    middle.plot(steps, [record["tokens_per_second"] for record in records], color="#1b9e77", marker="o", markersize=3)
    middle.set_ylabel("tokens/s")
    middle.set_ylim(bottom=0)
    seconds = [[record["seconds"].get(phase, 0.0) for record in records] for phase in PHASES]
    bottom.stackplot(steps, seconds, labels=PHASES, colors=COLORS)
    bottom.set_ylabel("seconds of a step")
    bottom.set_xlabel("step")
    bottom.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(PHASES), fontsize="small", frameon=False)
    for axis in (top, middle, bottom):
        axis.grid(alpha=0.3)
        axis.margins(x=0.01)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
