"""What a run of `seqmesh prepare` did, and its progress while it runs; how both are shown is in `prepared`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from seqmesh.loader.manifest import Manifest

QUIET_SECONDS = 5.0  # between lines of progress where there is no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is. `fraction` is the share of the input's bytes (or of max_tokens), 0 where unknown."""

    documents: int
    tokens: int
    fraction: float
    seconds: float  # since reading began, without training
    resumed_tokens: int = 0  # of `tokens`, those that an interrupted run had made
    remaining: float | None = None  # seconds that it will still take, None where nobody can tell yet


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What a run did. `seconds` is the time spent on reading, tokenising and writing, without training.

    `resumed_tokens` is how many of the set's tokens an interrupted run had made, in which time is not known. stages:
    seconds of processes spent on each, which are more than `seconds` where several work. left_out: of each source, the
    numbers of records that did not go into the set, by what became of them.
    """

    manifest: Manifest
    engine: str
    engine_reason: str
    seconds: float
    resumed_tokens: int = 0
    workers: int = 1
    stages: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        """Tokens that were made in `seconds`."""
        return self.manifest.tokens - self.resumed_tokens


@contextmanager
def progress_display(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A live bar on a terminal; elsewhere at most one line every QUIET_SECONDS."""
    if not console.is_terminal:
        yield _line_printer(console)
        return
    columns = (
        TextColumn("{task.fields[documents]:,} documents  {task.fields[tokens]:,} tokens  {task.fields[rate]}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, documents=0, tokens=0, rate="")

        def show(update: Progress) -> None:
            rate = _rate(update.tokens - update.resumed_tokens, update.seconds)
            total = 1.0 if update.fraction else None  # unknown sizes: a bar that only pulses
            bar.update(
                task,
                completed=update.fraction,
                total=total,
                documents=update.documents,
                tokens=update.tokens,
                rate=rate,
            )

        yield show


def _line_printer(console: Console) -> Callable[[Progress], None]:
    last = time.perf_counter()

    def show(update: Progress) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= QUIET_SECONDS:
            last = now
            share = f", {update.fraction:.0%}" if update.fraction else ""
            rate = _rate(update.tokens - update.resumed_tokens, update.seconds)
            left = "" if update.remaining is None else f", {update.remaining:,.0f} s left"
            line = f"{update.documents:,} documents, {update.tokens:,} tokens, {rate}{share}{left}"
            console.print(line, markup=False, highlight=False)

    return show


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
