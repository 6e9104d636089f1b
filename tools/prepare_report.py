"""What `seqmesh prepare` shows: progress while it runs, a table when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from seqmesh.loader.manifest import Manifest

QUIET_SECONDS = 5.0  # between lines of progress where there is no terminal
TOP_SOURCES = 10


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

    `resumed_tokens` is how many of the set's tokens an interrupted run had made, in which time is not known.
    """

    manifest: Manifest
    engine: str
    engine_reason: str
    source_documents: dict[str, int]
    source_tokens: dict[str, int]
    seconds: float
    resumed_tokens: int = 0


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


def print_report(console: Console, report: PrepareReport) -> None:
    """The final table."""
    counts, manifest = report.manifest.counts, report.manifest
    table = Table(title="prepared", show_header=False, title_justify="left")
    table.add_column(justify="left")
    table.add_column(justify="right", overflow="fold")
    for name, what in (("documents_in", "read"), ("documents_out", "kept"), ("empty", "empty"), ("refused", "refused")):
        table.add_row(f"documents {what}", f"{counts[name]:,}")
    table.add_section()
    table.add_row("tokens", f"{manifest.tokens:,}")
    for name in sorted(report.source_tokens, key=lambda name: (-report.source_tokens[name], name))[:TOP_SOURCES]:
        documents, tokens = report.source_documents[name], report.source_tokens[name]
        table.add_row(f"  {_plain(name)}", f"{tokens:,} in {documents:,} documents")
    if len(report.source_tokens) > TOP_SOURCES:
        table.add_row("  further sources", f"{len(report.source_tokens) - TOP_SOURCES:,}")
    table.add_section()
    table.add_row("vocabulary", f"{manifest.vocab_size:,} ({manifest.token_dtype})")
    table.add_row("shards", f"{len(manifest.shards):,} ({sum(shard.bytes for shard in manifest.shards):,} bytes)")
    table.add_row("engine", report.engine)
    if report.resumed_tokens:
        table.add_row("tokens found finished", f"{report.resumed_tokens:,}")
    table.add_row("time", f"{report.seconds:.1f} s, {_rate(manifest.tokens - report.resumed_tokens, report.seconds)}")
    console.print(table)


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


def _plain(text: str) -> str:
    """Names come from the data: brackets in them are no markup."""
    return text.replace("[", r"\[")
