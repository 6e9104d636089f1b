"""The report's tables as rows of text, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence

from seqmesh.tools.prepare_report import PrepareReport
from seqmesh.tools.prepared.account import Account, SourceAccount

Row = tuple[str, ...]

# Of the manifest's counts, and what they are called.
COUNTS = {
    "documents_in": "read",
    "documents_out": "kept",
    "empty": "empty",
    "refused": "refused",
    "sampled_out": "not in the sample",
    "too_short": "too short",
    "too_long": "too long",
    "duplicate": "duplicate",
}
NOT_DOCUMENTS = ("text_bytes", "tokens_out")


def count_rows(report: PrepareReport) -> list[Row]:
    """What became of the documents. What no filter left out is not mentioned."""
    counts = report.manifest.counts
    known = [(name, COUNTS[name]) for name in COUNTS if name in counts]
    others = [(name, name.replace("_", " ")) for name in counts if name not in (*COUNTS, *NOT_DOCUMENTS)]
    return [(f"documents {what}", f"{counts[name]:,}") for name, what in (*known, *others)]


def source_rows(report: PrepareReport, account: Account) -> tuple[Row, list[Row]]:
    """Titles, and a row for each source. Columns that are the same for all are left out."""
    kinds = sorted({kind for counts in report.left_out.values() for kind in counts})
    masked = is_masked(account)
    titles = ["source", "documents", "tokens", "share", "mean", *(["learned"] if masked else [])]
    titles += [COUNTS.get(kind, kind) for kind in kinds]
    total = max(report.manifest.tokens, 1)
    rows = [
        (
            source.name,
            f"{source.documents:,}",
            f"{source.tokens:,}",
            f"{source.tokens / total:.1%}",
            f"{source.tokens / max(source.documents, 1):,.0f}",
            *([f"{source.supervised:,}"] if masked else []),
            *(f"{report.left_out.get(source.name, {}).get(kind, 0):,}" for kind in kinds),
        )
        for source in all_sources(report, account)
    ]
    return tuple(titles), rows


def all_sources(report: PrepareReport, account: Account) -> tuple[SourceAccount, ...]:
    """The sources of the set, then those of which nothing was kept."""
    known = {source.name for source in account.sources}
    others = sorted(report.left_out.keys() - known)
    return (*account.sources, *(SourceAccount(name=name, documents=0, tokens=0, supervised=0) for name in others))


def is_masked(account: Account) -> bool:
    """Whether some tokens are not learned, but for the first of each document, which nothing predicts."""
    return account.supervised < sum(source.tokens - source.documents for source in account.sources)


def length_rows(account: Account) -> list[Row]:
    """Lengths, documents, tokens, and the share of all tokens."""
    total = max(sum(part.tokens for part in account.lengths), 1)
    return [
        (f"{part.low:,} to {part.high - 1:,}", f"{part.documents:,}", f"{part.tokens:,}", f"{part.tokens / total:.1%}")
        for part in account.lengths
    ]


def quantile_line(account: Account) -> str:
    """How long documents are."""
    if not account.quantiles:
        return "no documents"
    *shares, (_, longest) = account.quantiles
    parts = [f"{share:.0%} of documents have at most {length:,} tokens" for share, length in shares]
    return f"{', '.join(parts)}; the longest has {longest:,}"


def refusal_rows(account: Account) -> list[Row]:
    """Reasons, how often, where first."""
    return [(reason.reason, f"{reason.count:,}", "; ".join(reason.first)) for reason in account.reasons]


def stage_rows(report: PrepareReport) -> list[Row]:
    """Time by stage, with its share where all are known."""
    spent = sum(report.stages.values())
    return [(f"time of {name}", f"{seconds:.1f} s, {seconds / spent:.0%}") for name, seconds in _stages(report, spent)]


def rate_rows(report: PrepareReport) -> list[Row]:
    """Time as a whole, and what was done in it."""
    rows: list[Row] = [("tokens found finished", f"{report.resumed_tokens:,}")] if report.resumed_tokens else []
    processes = f" in {report.workers:,} processes" if report.workers > 1 else ""
    rows.append(("time", f"{report.seconds:.1f} s{processes}, {rate(report.new_tokens, report.seconds)}"))
    if not report.resumed_tokens:
        text = report.manifest.counts.get("text_bytes", 0) / 1e6 / max(report.seconds, 1e-9)
        rows.append(("text", f"{text:,.1f} MB/s"))
    return rows


def rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"


def decimal(number: float) -> str:
    """A number in few characters: 1,500,000 is 1.5M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _stages(report: PrepareReport, spent: float) -> Sequence[tuple[str, float]]:
    return [(name, seconds) for name, seconds in report.stages.items() if spent]
