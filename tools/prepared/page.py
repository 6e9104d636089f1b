"""The report of `prepare` as one page of HTML: what came in, what went out, lengths, sources, refusals, time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from seqmesh.tools import pages
from seqmesh.tools.prepare_report import PrepareReport
from seqmesh.tools.prepared.account import Account, LengthBin
from seqmesh.tools.prepared.rows import (
    count_rows,
    decimal,
    quantile_line,
    rate_rows,
    refusal_rows,
    source_rows,
    stage_rows,
)

DOCUMENTS, TOKENS, GRID = "#1f4e79", "#1b9e77", "#dddddd"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 230, 60, 40, 30  # of a chart, in pixels
STYLE = (
    "td:first-child,th:first-child{text-align:left}td.wide{text-align:left;max-width:60em;overflow-wrap:anywhere}"
    "svg text{font:12px sans-serif}"
)


def report_page(report: PrepareReport, account: Account) -> bytes:
    """The page."""
    body = [f"<div>{escape(line)}</div>" for line in _heading(report)]
    body += pages.table((), count_rows(report))
    if account.lengths:
        body += ["<h2>Lengths</h2>", *_charts(account.lengths), f"<div>{escape(quantile_line(account))}</div>"]
    if account.sources or report.left_out:
        body += ["<h2>Sources</h2>", *pages.table(*source_rows(report, account))]
    if account.reasons:
        body += ["<h2>Refused</h2>", *pages.table(("reason", "records", "first of them"), refusal_rows(account))]
    body += ["<h2>Time</h2>", *pages.table((), (*stage_rows(report), *rate_rows(report)))]
    return pages.page("seqmesh prepare", body, style=STYLE)


def _heading(report: PrepareReport) -> list[str]:
    manifest = report.manifest
    return [
        f"{manifest.tokens:,} tokens in {manifest.documents:,} documents, {len(manifest.shards):,} shards of "
        f"{sum(shard.bytes for shard in manifest.shards):,} bytes",
        f"vocabulary of {manifest.vocab_size:,} ({manifest.token_dtype}), tokenizer {manifest.tokenizer}",
        f"engine {report.engine}: {report.engine_reason}; processes: {report.workers:,}",
    ]


def _charts(bins: Sequence[LengthBin]) -> list[str]:
    """Documents by length, and below it where the tokens are."""
    return [
        _chart("documents by length", bins, lambda part: part.documents, DOCUMENTS),
        _chart("tokens by the length of their document", bins, lambda part: part.tokens, TOKENS),
    ]


def _chart(title: str, bins: Sequence[LengthBin], value: Callable[[LengthBin], int], color: str) -> str:
    """Bars in SVG: one a bin, a line for the highest and half of it, the beginning of each bin below."""
    most = max(map(value, bins)) or 1
    floor, step = HEIGHT - BOTTOM, (WIDTH - LEFT) / len(bins)
    rise = (floor - TOP) / most
    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for level in (0, most / 2, most):
        y = floor - level * rise
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{decimal(level)}</text>')
    for number, part in enumerate(bins):
        x, height = LEFT + number * step, value(part) * rise
        note = f"{part.low:,} to {part.high - 1:,} tokens: {value(part):,}"
        parts.append(
            f'<rect x="{x + 0.1 * step:.1f}" y="{floor - height:.1f}" width="{0.8 * step:.1f}" '
            f'height="{height:.1f}" fill="{color}"><title>{escape(note)}</title></rect>'
        )
        parts.append(f'<text x="{x + step / 2:.1f}" y="{floor + 16}" text-anchor="middle">{binary(part.low)}</text>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">tokens of a document, from</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def binary(number: int) -> str:
    """A power of two, short: 2048 is 2K."""
    power = (number.bit_length() - 1) // 10
    return f"{number >> (10 * power)}{'KMGT'[power - 1] if power else ''}"
