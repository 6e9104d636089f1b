"""The picture of a mesh of processes, for docs/parallelism.md: who is where, and which groups go through whom.

    python -m seqmesh.tools.mesh_picture docs/parallelism.png

Stages from left to right, replicas from top to bottom, tensor peers side by side. Numbers and lines are those that the
trainer makes its groups by.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from seqmesh.trainer.grid import ParallelConfig, lines_through

CONFIG, PROCESSES = ParallelConfig(tensor=2, stages=2), 8
MACHINE = 4  # processes
TENSOR, DATA, STAGES, RETURNS, MACHINES = "#d95f02", "#1f78b4", "#1b9e77", "#7570b3", "#eef1f4"
BOX, PEER, STAGE, REPLICA = 0.34, 1.0, 3.4, 1.7  # half a box, and from one to the next
LEGEND = (
    (TENSOR, "tensor: rows are gathered and sums scattered in every layer"),
    (DATA, "data: gradients are summed once a step; rings, in the group of all"),
    (STAGES, "stages: rows go forward"),
    (RETURNS, "returns: their gradients come back"),
)
TOP = 2.7  # of the picture, over the first row's middle
DPI = 120


def draw(path: Path, config: ParallelConfig = CONFIG, processes: int = PROCESSES, machine: int = MACHINE) -> None:
    """Write the picture, in the format of the path's suffix. machine: processes of one. Raises ValueError where they
    are not so many whole replicas."""
    from matplotlib.figure import Figure

    replicas = config.replicas(processes)
    right, low = STAGE * (config.stages - 1) + PEER * (config.tensor - 1) + 1.0, -REPLICA * (replicas - 1) - 1.1
    figure = Figure(figsize=(right + 2.0, TOP - low), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-2.0, right), ylim=(low, TOP))
    axes.set_axis_off()
    _machines(axes, config, processes, machine)
    for process in range(processes):
        _lines(axes, process, config, processes)
    for process in range(processes):
        _box(axes, process, config, processes)
    for number, (color, words) in enumerate(LEGEND):
        axes.text(-0.6, TOP - 0.3 * (number + 1), words, color=color, fontsize=9)
    for stage in range(config.stages):
        axes.text(STAGE * stage - BOX, 0.95, f"stage {stage}", fontsize=10)
    for replica in range(replicas):
        axes.text(-1.9, -REPLICA * replica, f"replica {replica}", fontsize=10, va="center")
    figure.savefig(path)


def _center(process: int, config: ParallelConfig, processes: int) -> tuple[float, float]:
    """Where its box is, by its place in the lines that go through it."""
    lines = lines_through(process, processes, config)
    stage, replica, peer = (line.index(process) for line in (lines.stages, lines.data, lines.tensor))
    return STAGE * stage + PEER * peer, -REPLICA * replica


def _box(axes: Any, process: int, config: ParallelConfig, processes: int) -> None:
    from matplotlib.patches import Rectangle

    x, y = _center(process, config, processes)
    axes.add_patch(Rectangle((x - BOX, y - BOX), 2 * BOX, 2 * BOX, facecolor="white", edgecolor="#333333", zorder=3))
    axes.text(x, y, str(process), ha="center", va="center", fontsize=12, zorder=4)


def _lines(axes: Any, process: int, config: ParallelConfig, processes: int) -> None:
    """From a process to the next of each line, and around its tensor peers."""
    from matplotlib.patches import FancyBboxPatch

    lines, here = lines_through(process, processes, config), _center(process, config, processes)
    if lines.tensor[0] == process and config.tensor > 1:
        span = PEER * (config.tensor - 1) + 2 * BOX
        around = FancyBboxPatch((here[0] - BOX, here[1] - BOX), span, 2 * BOX, boxstyle="round,pad=0.1")
        around.set(facecolor="none", edgecolor=TENSOR, linewidth=2)
        axes.add_patch(around)
    back = lines.stages[::-1]
    for line, color, bend in ((lines.data, DATA, 0.0), (lines.stages, STAGES, -0.25), (back, RETURNS, -0.25)):
        for other in line[line.index(process) + 1 :][:1]:
            style = {"arrowstyle": "-" if line is lines.data else "-|>", "color": color, "linewidth": 1.6}
            style |= {"connectionstyle": f"arc3,rad={bend}", "shrinkA": 26, "shrinkB": 30, "zorder": 5}
            axes.annotate("", _center(other, config, processes), here, arrowprops=style)


def _machines(axes: Any, config: ParallelConfig, processes: int, machine: int) -> None:
    """A field behind the processes of each."""
    from matplotlib.patches import Rectangle

    for first in range(0, processes, machine):
        places = [_center(process, config, processes) for process in range(first, min(first + machine, processes))]
        (left, right), (bottom, top) = ((min(each), max(each)) for each in zip(*places, strict=True))
        size = right - left + 4 * BOX, top - bottom + 4.4 * BOX
        axes.add_patch(Rectangle((left - 2 * BOX, bottom - 2.2 * BOX), *size, facecolor=MACHINES, zorder=0))
        axes.text(left - 1.8 * BOX, bottom - 2.1 * BOX, f"machine {first // machine}", fontsize=8, color="#888888")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
