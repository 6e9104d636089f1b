"""What a run says of itself: time by phase, one JSON line per step, one line for people.

Metrics (`log.jsonl`) are written by the first process; one process of every rank writes the digests of the batches that
it was served (`batches-<rank>.jsonl`), so that two runs can be compared batch by batch. After a resume, a repeated
step's line stands twice; the last one counts.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, TextIO

from seqmesh.trainer.step import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as it is logged.

    tokens_per_second: real ones. rows_per_second: with padding, of which `padding` is the share of what was computed.
    fill: tokens over the capacity of all micro-batches. mfu: model FLOPs over what all ranks could have done, see
    `flops`. memory: the first rank's most bytes so far. rings: documents spread over ranks. ring_bytes: what this rank
    sent for them. offload_bytes: what it moved to the host, and back. expert_load: rows of the fullest expert over the
    mean of its layer, 1 without experts. seconds: of this rank, by phase (the checkpoint
    before the step is `save`). total: the whole step, with what no phase claims.
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
    offload_bytes: int
    tokens_per_second: float
    rows_per_second: float
    padding: float
    fill: float
    mfu: float
    memory: int
    imbalance: float
    seconds: dict[str, float]
    total: float
    expert_load: float = 1.0

    @property
    def wait_share(self) -> float:
        """Share of the step spent waiting for data."""
        return self.seconds.get("data", 0.0) / self.total if self.total else 0.0


class StepClock:
    """Seconds of each phase of the current step. doing: the phase that runs, empty between two."""

    def __init__(self) -> None:
        self.doing = ""
        self.restart()

    def restart(self) -> None:
        self._begin = self._since = time.perf_counter()
        self.spans: list[tuple[str, float]] = []

    def phase(self, name: str) -> _Span:
        """To be used in a with statement. One inside another interrupts that. Costs less than a microsecond."""
        return _Span(self, name)

    def turn_to(self, doing: str) -> None:
        """From now on that is what is done."""
        now = time.perf_counter()
        if self.doing:
            self.spans.append((self.doing, now - self._since))
        self.doing, self._since = doing, now

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, so far."""
        sums: dict[str, float] = {}
        for name, seconds in self.spans:
            sums[name] = sums.get(name, 0.0) + seconds
        return sums

    @property
    def total(self) -> float:
        return time.perf_counter() - self._begin


class _Span:
    __slots__ = ("_clock", "_name", "_outer")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._outer = self._clock.doing
        self._clock.turn_to(self._name)

    def __exit__(self, *_failure: object) -> None:
        self._clock.turn_to(self._outer)


class Pace:
    """Seconds of the latest steps. The first one of a process, which connects and compiles, counts only until there is
    another."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=50)
        self.steps = 0

    def add(self, seconds: float) -> None:
        if self.steps == 1:
            self._latest.clear()
        self._latest.append(seconds)
        self.steps += 1

    @property
    def mean(self) -> float:
        return fmean(self._latest)

    @property
    def median(self) -> float:
        return median(self._latest)


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
    offload_bytes: int = 0,
    flops: float = 0.0,
    peak: float = math.inf,
    memory: int = 0,
    expert_load: float = 1.0,
) -> StepRecord:
    """Put together a step that has just been done. flops: of the step on all ranks; peak: of all ranks, in a second."""
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
        offload_bytes=offload_bytes,
        tokens_per_second=tokens / total,
        rows_per_second=result.rows / total,
        padding=1 - tokens / result.rows if result.rows else 0.0,
        fill=result.fill,
        mfu=flops / (total * peak),
        memory=memory,
        imbalance=imbalance,
        seconds=clock.seconds,
        total=total,
        expert_load=expert_load,
    )


def step_line(record: StepRecord, steps: int, left: float) -> str:
    """The line for people. left: estimated seconds to the end."""
    skipped = "" if record.updated else "  update skipped"
    experts = f"fullest expert {record.expert_load:4.2f}  " if record.expert_load > 1 else ""
    return (
        f"step {record.step:>{len(str(steps))}}/{steps}  loss {record.loss:6.3f}  norm {record.grad_norm:7.3f}  "
        f"{record.tokens_per_second:8,.0f} tokens/s  MFU {record.mfu:5.1%}  memory {record.memory / 2**30:.2f} GiB  "
        f"fill {record.fill:6.1%}  padding {record.padding:5.1%}  rings {record.rings:2d}  "
        f"imbalance {record.imbalance:5.3f}  {experts}data wait {record.wait_share:5.1%}  "
        f"ETA {clock_time(left)}{skipped}"
    )


def clock_time(seconds: float) -> str:
    """As 1:01 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
