"""What a run says of itself: time by phase, one JSON line per step, one line for people.

Metrics (`log.jsonl`) are written by the first rank; every rank writes the digests of the batches it was served
(`batches-<rank>.jsonl`), so that two runs can be compared batch by batch. After a resume, a repeated step's line stands
twice; the last one counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from seqmesh.trainer.step import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as it is logged.

    rings: documents spread over ranks. ring_bytes: what this rank sent for them. seconds: of this rank, by phase (the
    checkpoint before the step is `save`). total: the whole step, with what no phase claims.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    updated: bool
    tokens: int
    rings: int
    ring_bytes: int
    tokens_per_second: float
    fill: float
    imbalance: float
    seconds: dict[str, float]
    total: float

    @property
    def wait_share(self) -> float:
        """Share of the step spent waiting for data."""
        return self.seconds.get("data", 0.0) / self.total if self.total else 0.0


class StepClock:
    """Seconds of each phase of the current step."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._begin = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    @property
    def total(self) -> float:
        return time.perf_counter() - self._begin


def make_record(
    result: StepResult,
    clock: StepClock,
    *,
    step: int,
    epoch: int,
    tokens: int,
    rings: int,
    ring_bytes: int,
    imbalance: float,
) -> StepRecord:
    """Put together a step that has just been done."""
    total = clock.total
    return StepRecord(
        step=step,
        epoch=epoch,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        updated=result.updated,
        tokens=tokens,
        rings=rings,
        ring_bytes=ring_bytes,
        tokens_per_second=tokens / total if total else 0.0,
        fill=result.fill,
        imbalance=imbalance,
        seconds=dict(clock.seconds),
        total=total,
    )


def step_line(record: StepRecord, steps: int, left: float) -> str:
    """The line for people. left: estimated seconds to the end."""
    minutes, seconds = divmod(round(left), 60)
    skipped = "" if record.updated else "  update skipped"
    return (
        f"step {record.step:>{len(str(steps))}}/{steps}  loss {record.loss:6.3f}  norm {record.grad_norm:7.3f}  "
        f"{record.tokens_per_second:8,.0f} tokens/s  fill {record.fill:6.1%}  rings {record.rings:2d}  "
        f"imbalance {record.imbalance:5.3f}  "
        f"data wait {record.wait_share:5.1%}  ETA {minutes}:{seconds:02d}{skipped}"
    )


class JsonLines:
    """An append-only file of one JSON object per line, flushed line by line."""

    def __init__(self, path: Path) -> None:
        _end_last_line(path)
        self._file: TextIO = path.open("a")

    def write(self, record: StepRecord | dict[str, Any]) -> None:
        fields = asdict(record) if isinstance(record, StepRecord) else record
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Records by step, the last one of each. A last line that a kill cut short is left out."""
    records: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[record["step"]] = record
    return dict(sorted(records.items()))


def _end_last_line(path: Path) -> None:
    """Begin on a fresh line after a kill in the middle of one."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")
