"""The report of `prepare`: a table in the terminal, JSON and a page of HTML where they are asked for.

Nothing of it is written into the set's folder: a set's files depend on inputs and options, a report on the clock too.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from seqmesh.loader.files import atomic_write
from seqmesh.tools.output import identity, print_written
from seqmesh.tools.prepare_report import PrepareReport
from seqmesh.tools.prepared.account import Account, account_of
from seqmesh.tools.prepared.page import report_page
from seqmesh.tools.prepared.rows import (
    all_sources,
    count_rows,
    is_masked,
    length_rows,
    quantile_line,
    rate_rows,
    refusal_rows,
    stage_rows,
)

TOP_SOURCES = 10
BAR_CHARACTERS = 30


def print_report(
    console: Console, report: PrepareReport, folder: Path, *, json_file: Path | None = None, html: Path | None = None
) -> None:
    """Show what a run made of `folder`, and write it down where asked. Raises OSError naming a file."""
    account = account_of(folder, report.manifest)
    console.print(_summary(report, account))
    if account.lengths:
        console.print(_lengths(account))
        console.print(quantile_line(account), highlight=False, markup=False, soft_wrap=True)
    if account.reasons:
        console.print(_refusals(account))
    if json_file:
        atomic_write(json_file, json.dumps(as_json(folder, report, account), indent=2).encode() + b"\n")
    if html:
        atomic_write(html, report_page(report, account))
    print_written(console, json_file, html)


def as_json(folder: Path, report: PrepareReport, account: Account) -> dict[str, Any]:
    """The report with all numbers. Rates are of this run: tokens of an interrupted one do not count in them."""
    counts = report.manifest.counts
    seconds = max(report.seconds, 1e-9)
    return {
        **identity(folder, report.manifest),
        "counts": dict(counts),
        "shards": len(report.manifest.shards),
        "shard_bytes": sum(shard.bytes for shard in report.manifest.shards),
        "supervised_tokens": account.supervised,
        "sources": [
            asdict(source) | {"left_out": dict(report.left_out.get(source.name, {}))}
            for source in all_sources(report, account)
        ],
        "lengths": [asdict(part) for part in account.lengths],
        "quantiles": [{"share": share, "length": length} for share, length in account.quantiles],
        "refusals": [asdict(reason) for reason in account.reasons],
        "engine": report.engine,
        "engine_reason": report.engine_reason,
        "workers": report.workers,
        "seconds": report.seconds,
        "stages": dict(report.stages),
        "resumed_tokens": report.resumed_tokens,
        "tokens_per_second": report.new_tokens / seconds,
    }


def _summary(report: PrepareReport, account: Account) -> Table:
    manifest = report.manifest
    table = Table(title="prepared", show_header=False, title_justify="left")
    table.add_column(justify="left")
    table.add_column(justify="right", overflow="fold")
    for name, value in count_rows(report):
        table.add_row(name, value)
    table.add_section()
    table.add_row("tokens", f"{manifest.tokens:,}")
    sources = all_sources(report, account)
    for source in sources[:TOP_SOURCES]:
        gone = sum(report.left_out.get(source.name, {}).values())
        left_out = f", {gone:,} left out" if gone else ""
        table.add_row(f"  {_plain(source.name)}", f"{source.tokens:,} in {source.documents:,} documents{left_out}")
    if len(sources) > TOP_SOURCES:
        table.add_row("  further sources", f"{len(sources) - TOP_SOURCES:,}")
    if is_masked(account):
        table.add_row("tokens learned", f"{account.supervised:,}")
    table.add_section()
    table.add_row("vocabulary", f"{manifest.vocab_size:,} ({manifest.token_dtype})")
    table.add_row("shards", f"{len(manifest.shards):,} ({sum(shard.bytes for shard in manifest.shards):,} bytes)")
    table.add_row("engine", report.engine)
    for name, value in (*stage_rows(report), *rate_rows(report)):
        table.add_row(name, value)
    return table


def _lengths(account: Account) -> Table:
    table = Table(title="lengths in tokens", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    for title in ("length", "documents", "tokens", "of all"):
        table.add_column(title, justify="right")
    table.add_column("")
    most = max(part.tokens for part in account.lengths)
    for cells, part in zip(length_rows(account), account.lengths, strict=True):
        table.add_row(*cells, "█" * round(BAR_CHARACTERS * part.tokens / most))
    return table


def _refusals(account: Account) -> Table:
    table = Table(title="refused", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("records", justify="right")
    table.add_column("reason", overflow="fold")
    table.add_column("first of them", overflow="fold")
    for reason, count, first in refusal_rows(account):
        table.add_row(count, _plain(reason), _plain(first))
    return table


def _plain(text: str) -> str:
    """Names and reasons come from the data: brackets in them are no markup."""
    return text.replace("[", r"\[")
