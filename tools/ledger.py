"""`seqmesh ledger`: what a step trained on, which steps saw a document, or which steps were recorded at all.

Reads the files of a ledger's folder, see `loader.ledger`, and the shard set, where it is still there, for the names of
documents and for steps that a killed loader had not written yet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqmesh.loader.files import atomic_write
from seqmesh.loader.ledger.file import Record
from seqmesh.loader.ledger.reading import Ledger, opened
from seqmesh.tools.output import check_folders, print_whole, print_written

MOST_LISTED = 20  # gaps and runs


def run(
    *,
    folder: Path,
    step: int | None = None,
    documents: bool = False,
    every: bool = False,
    document: int | None = None,
    data: str | None = None,
    json_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """The whole command. every: all times that the step was served. data: where the shard set is by now.

    Raises FileNotFoundError where the folder holds no ledger, ValueError for a step that is not in it, or that is
    missing and can not be planned again.
    """
    if step is not None and document is not None:
        raise ValueError("both a step and a document are asked for: choose one")
    check_folders(json_path)
    console, ledger = console or Console(), Ledger(folder)
    for words in ledger.damage:
        console.print(f"damaged: {words}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if step is not None:
        found = _show_step(console, ledger.find(step, data), documents=documents, every=every, data=data)
    elif document is not None:
        found = _show_document(console, ledger, document)
    else:
        found = _show_summary(console, ledger)
    if json_path is not None:
        atomic_write(json_path, json.dumps(found | {"damage": ledger.damage}).encode() + b"\n")
        print_written(console, json_path)


@dataclass(frozen=True, slots=True)
class _Names:
    """Of a record's documents and of their sources, None where they are not known. missing: why they are not."""

    doc_ids: list[str | None]
    sources: list[str | None]
    missing: str = ""

    @classmethod
    def of(cls, record: Record, data: str | None) -> _Names:
        documents = record.document.tolist()
        sources: list[str | None] = [None] * len(documents)
        if record.head.settings.mixture is not None:  # else all are one source, whatever they are
            sources = [record.head.sources[code] for code in record.source.tolist()]
        try:
            with opened(record, data) as feed:
                shards = feed.shards
                if sources and sources[0] is None and shards.arrivals is None:  # or all would have to be fetched
                    sources = [shards.sources[code] for code in shards.source_codes()[record.document].tolist()]
                return cls([shards.doc_id(document) for document in documents], sources)
        except ValueError as error:
            missing = f"{error}; so there are no names of documents (--data says where the data are)"
            return cls([None] * len(documents), sources, missing)


def _show_step(
    console: Console, records: list[Record], *, documents: bool, every: bool, data: str | None
) -> dict[str, Any]:
    shown = records if every else records[-1:]
    written = []
    for record in shown:
        names = _Names.of(record, data)
        if record is shown[0]:
            _say_times(console, records, every=every)
        _show_record(console, record)
        if documents:
            _show_documents(console, record, names)
        written.append(record_to_dict(record, names.doc_ids, names.sources))
    return {"step": records[-1].step, "times_served": len(records), "records": written}


def _say_times(console: Console, records: list[Record], *, every: bool) -> None:
    if len(records) > 1:
        _say(console, f"served {len(records)} times; " + ("each of them:" if every else "the latest (--all: each):"))


def _show_record(console: Console, record: Record) -> None:
    head = record.head
    where = f"by {head.host}, process {head.pid}, in {record.file}"
    again = "planned again: no loader has left a record that it was served"
    told = f"served {_time(record.time)} {where}" if record.file else again
    _say(console, f"step {record.step}, epoch {record.epoch}, {told}")
    table = Table(box=SIMPLE, show_header=False)
    for name, value in {
        "tokens": f"{record.tokens:,}",
        "supervised tokens": f"{record.supervised_tokens:,}",
        "documents": f"{len(record.document):,}",
        "in rings": f"{record.rings:,}",
        "imbalance": f"{record.imbalance:.4f}",
        "plan": record.plan,
        "data": f"{head.settings.data} ({head.data})",
    }.items():
        table.add_row(name, Text(value))
    print_whole(console, table)
    print_whole(console, _rank_table(record))


def _rank_table(record: Record) -> Table:
    table = Table(box=SIMPLE, title="by rank", title_justify="left")
    for name in ("rank", "micro-batches", "documents", "tokens"):
        table.add_column(name, justify="right")
    documents, tokens = record.by_rank()
    for rank, row in enumerate(zip(record.waves.tolist(), documents.tolist(), tokens.tolist(), strict=True)):
        table.add_row(str(rank), *(f"{value:,}" for value in row))
    return table


def _show_documents(console: Console, record: Record, names: _Names) -> None:
    if names.missing:
        _say(console, names.missing)
    table = Table(box=SIMPLE, title="documents", title_justify="left")
    for name in ("row", "doc_id", "source", "offset", "length", "ranks"):
        table.add_column(name, justify="left" if name in ("doc_id", "source", "ranks") else "right")
    columns = record.document.tolist(), names.doc_ids, names.sources, record.offset.tolist(), record.length.tolist()
    for row, doc_id, source, offset, length, ranks in zip(*columns, record.ranks_of, strict=True):
        held = " ".join(map(str, ranks))
        table.add_row(str(row), _name(doc_id), _name(source), f"{offset:,}", f"{length:,}", held)
    print_whole(console, table)


def _show_document(console: Console, ledger: Ledger, document: int) -> dict[str, Any]:
    table = Table(box=SIMPLE, title=f"document {document}", title_justify="left")
    for name in ("step", "epoch", "served", "offset", "length", "ranks"):
        table.add_column(name, justify="left" if name in ("served", "ranks") else "right")
    found = []
    for step in ledger.steps_with(document):
        for record in ledger.recorded(step):
            for place in (record.document == document).nonzero()[0].tolist():
                offset, length, ranks = int(record.offset[place]), int(record.length[place]), record.ranks_of[place]
                row = step, record.epoch, record.time.isoformat(), offset, length, ranks
                found.append(dict(zip(("step", "epoch", "time", "offset", "length", "ranks"), row, strict=True)))
                held = " ".join(map(str, ranks))
                table.add_row(str(step), str(record.epoch), _time(record.time), f"{offset:,}", f"{length:,}", held)
    if found:
        print_whole(console, table)
    else:
        _say(console, f"no step that was recorded saw document {document}")
    if ledger.gaps:
        _say(console, f"not searched, since they are missing: {_ranges(ledger.gaps)}")
    return {"document": document, "seen": found, "missing": ledger.gaps}


def _show_summary(console: Console, ledger: Ledger) -> dict[str, Any]:
    steps = ledger.steps
    if not len(steps):
        _say(console, f"{ledger.folder}: no step yet")
        return {"steps": None, "runs": [], "missing": []}
    _say(console, f"{ledger.folder}: steps {steps[0]:,} to {steps[-1]:,}, {len(steps):,} recorded")
    if ledger.gaps:
        _say(console, f"missing: {_ranges(ledger.gaps)}; they are planned again when they are asked for")
    table = Table(box=SIMPLE, title="runs", title_justify="left")
    for name in ("run", "begun", "steps", "recorded", "by"):
        table.add_column(name, justify="left" if name in ("begun", "by") else "right")
    runs = [ledger.span(run) for run in range(ledger.runs[-1] + 1)]
    for number, each in enumerate(runs):
        span = "none" if each.steps == 0 else f"{each.first:,} to {each.last:,}"
        table.add_row(str(number), _time(each.begun), span, f"{each.steps:,}", ", ".join(each.hosts))
    print_whole(console, table)
    listed = [
        {"begun": each.begun.isoformat(), "first": each.first, "last": each.last, "steps": each.steps}
        | {"hosts": list(each.hosts)}
        for each in runs
    ]
    return {"steps": [int(steps[0]), int(steps[-1])], "recorded": len(steps), "runs": listed, "missing": ledger.gaps}


def record_to_dict(record: Record, doc_ids: list[str | None], sources: list[str | None]) -> dict[str, Any]:
    """Plain JSON. doc_ids, sources: names, None where they are not known."""
    names = ("step", "epoch", "plan", "tokens", "supervised_tokens", "rings", "imbalance")
    columns = record.document.tolist(), doc_ids, sources, record.offset.tolist(), record.length.tolist()
    keys = ("row", "doc_id", "source", "offset", "length", "ranks")
    return {name: getattr(record, name) for name in names} | {
        "time": record.time.isoformat() if record.file else None,
        "file": str(record.file) if record.file else None,
        "planned_again": record.file is None,
        "waves": record.waves.tolist(),
        "documents": [dict(zip(keys, row, strict=True)) for row in zip(*columns, record.ranks_of, strict=True)],
        "before": record.before.to_dict(),
        "after": record.after.to_dict(),
        "settings": json.loads(record.head.settings.to_json()),
        "data": record.head.data,
        "seqmesh": record.head.seqmesh,
    }


def _ranges(gaps: list[tuple[int, int]]) -> str:
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in gaps[:MOST_LISTED]]
    more = f" and {len(gaps) - MOST_LISTED} more gaps" if len(gaps) > MOST_LISTED else ""
    return "steps " + ", ".join(words) + more


def _name(name: str | None) -> Text:
    return Text("-" if name is None else name)


def _time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, markup=False, soft_wrap=True)
