"""The report of prepare: numbers that a slow count gives too, in the terminal, as JSON and as a page."""

from __future__ import annotations

import io
import json
import re
import xml.dom.minidom
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from seqmesh.loader.manifest import Manifest, read_manifest
from seqmesh.tools.prepare import PrepareOptions, run
from seqmesh.tools.prepare_report import PrepareReport
from seqmesh.tools.prepared.account import MOST_REASONS, OTHER_REASONS, account_of, length_bins
from seqmesh.tools.prepared.page import binary, report_page
from seqmesh.tools.prepared.rows import decimal
from seqmesh.tools.prepared.show import as_json, print_report
from seqmesh.tools.shard_writer import write_shards

LENGTHS = [1, 2, 3, 4, 7, 8, 300, 5000]
SOURCES = ["web", "<b>&", "web", "web", "[red]", "web", "web", "web"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spans = [None] * 7 + [[(100, 400)]]
    write_shards(tmp_path / "set", [[5] * n for n in LENGTHS], sources=SOURCES, targets=spans, shard_tokens=400)
    entries = [{"file": f"in{n % 2}.jsonl", "line": n, "reason": f"not UTF-8: character {n},0"} for n in range(1, 6)]
    entries += [{"file": "t.parquet", "row": 3, "record_batch": 1, "reason": "the field text is null"}]
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (tmp_path / "set" / "quarantine.jsonl").write_text(lines + '[1]\n{"file": 1\n')
    return tmp_path / "set"


def report_of(folder: Path, **options: Any) -> PrepareReport:
    fields: dict[str, Any] = {"engine": "tiktoken", "engine_reason": "proved"}
    return PrepareReport(manifest=_manifest(folder), seconds=2.0, **fields | options)


def _manifest(folder: Path) -> Manifest:
    counts = {"documents_in": 20, "documents_out": 8, "empty": 6, "refused": 6, "text_bytes": 4_000_000}
    return replace(read_manifest(folder), counts=counts)


@given(st.lists(st.integers(1, 1 << 40) | st.integers(0, 40).map(lambda power: 1 << power), max_size=50))
def test_bins_hold_what_a_slow_count_finds(lengths: list[int]) -> None:
    bins = length_bins(np.array(lengths, np.int64))
    for part in bins:
        inside = [length for length in lengths if part.low <= length < part.high]
        assert (part.documents, part.tokens) == (len(inside), sum(inside))
    assert sum(part.documents for part in bins) == len(lengths)
    assert all(one.high == other.low and one.high == 2 * one.low for one, other in pairwise(bins))
    assert not bins or (bins[0].documents and bins[-1].documents)


def test_an_account_of_a_set(folder: Path) -> None:
    account = account_of(folder, _manifest(folder))
    assert [(source.name, source.documents, source.tokens) for source in account.sources] == [
        ("web", 6, 5316), ("[red]", 1, 7), ("<b>&", 1, 2),
    ]  # fmt: skip
    assert account.supervised == sum(n - 1 for n in LENGTHS[:-1]) + 300
    assert account.quantiles == ((0.5, 4), (0.9, 5000), (0.99, 5000), (1.0, 5000))
    assert [(reason.reason, reason.count) for reason in account.reasons] == [
        ("not UTF-8: character N", 5), ("the field text is null", 1),
    ]  # fmt: skip
    assert account.reasons[0].first == ("in1.jsonl, line 1", "in0.jsonl, line 2", "in1.jsonl, line 3")
    assert account.reasons[1].first == ("t.parquet, row 3",)


def test_reasons_without_end_are_counted_together(folder: Path) -> None:
    names = [chr(ord("a") + n % 26) * (n // 26 + 1) for n in range(MOST_REASONS + 20)]
    entries = ({"file": "a", "line": 1, "reason": f"bad {name}"} for name in names)
    (folder / "quarantine.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    reasons = account_of(folder, _manifest(folder)).reasons
    assert (len(reasons), reasons[0].reason, reasons[0].count) == (MOST_REASONS + 1, OTHER_REASONS, 20)


def test_the_terminal_shows_counts_lengths_and_reasons(folder: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    print_report(console, report_of(folder, stages={"reading": 1.0, "writing": 3.0}), folder)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO
    shown = ("documents refused", "[red]", "<b>&", "4,096 to 8,191", "time of writing", "75%", "in1.jsonl, line 1")
    numbers = ("50% of documents have at most 4 tokens", "tokens learned", "2,662 tokens/s", "2.0 MB/s")
    assert [part for part in (*shown, *numbers) if part not in text] == []


def test_json_and_page_are_written_and_hold_the_same(folder: Path, tmp_path: Path) -> None:
    report = report_of(folder, workers=2, resumed_tokens=325, left_out={"web": {"empty": 4, "refused": 1}})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    console = Console(file=io.StringIO(), width=120)
    print_report(console, report, folder, json_file=tmp_path / "r.json", html=tmp_path / "r.html")
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    found = json.loads((tmp_path / "r.json").read_text())
    assert found == json.loads(json.dumps(as_json(folder, report, account_of(folder, report.manifest))))
    assert (found["tokens"], found["tokens_per_second"], found["workers"]) == (5325, 2500.0, 2)
    assert found["sources"][0] == {
        "name": "web", "documents": 6, "tokens": 5316, "supervised": found["sources"][0]["supervised"],
        "left_out": {"empty": 4, "refused": 1},
    }  # fmt: skip
    assert sum(part["documents"] for part in found["lengths"]) == 8
    page = (tmp_path / "r.html").read_text()
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert not re.findall(r'(?:src|href)="|url\(|@import', page)
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(pictures) == 2
    for picture, field in zip(pictures, ("documents", "tokens"), strict=True):
        bars = xml.dom.minidom.parseString(picture).getElementsByTagName("rect")
        notes = [bar.getElementsByTagName("title")[0].firstChild.data for bar in bars]  # type: ignore[union-attr]  # texts
        assert notes == [f"{p['low']:,} to {p['high'] - 1:,} tokens: {p[field]:,}" for p in found["lengths"]]
        tallest = max(bars, key=lambda bar: float(bar.getAttribute("height")))
        most = max(found["lengths"], key=lambda part: part[field])
        assert f"{most['low']:,} to" in unescape(tallest.toxml())


def test_a_set_without_documents_has_a_report(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [])
    report = report_of(tmp_path / "set")
    account = account_of(tmp_path / "set", report.manifest)
    assert (account.lengths, account.quantiles, account.reasons) == ((), (), ())
    assert b"<svg" not in report_page(report, account)
    print_report(Console(file=io.StringIO()), report, tmp_path / "set")


def test_short_numbers() -> None:
    assert [binary(number) for number in (1, 512, 1024, 1 << 19, 1 << 20, 1 << 31, 1 << 40)] == [
        "1", "512", "1K", "512K", "1M", "2G", "1T",
    ]  # fmt: skip
    assert [decimal(number) for number in (0, 7.5, 1500, 2_000_000)] == ["0", "7.5", "1.5K", "2M"]


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, texts: list[str]) -> None:
    lines = [json.dumps({"text": text}) for text in texts] + ["{}", '{"text": "  "}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = PrepareOptions(
        inputs=(str(tmp_path / "in.jsonl"),), out=tmp_path / "out", tokenizer="train:300", on_error="skip"
    )
    run(
        options,
        json_file=tmp_path / "report.json",
        html=tmp_path / "report.html",
        console=Console(file=io.StringIO()),
    )
    found = json.loads((tmp_path / "report.json").read_text())
    place = f"{tmp_path}/in.jsonl, line {len(texts) + 1}"
    assert found["refusals"] == [{"reason": "no field text", "count": 1, "first": [place]}]
    assert found["counts"]["documents_in"] == len(texts) + 2
    assert (tmp_path / "report.html").stat().st_size > 2000
    with pytest.raises(FileNotFoundError, match="is no folder"):
        run(
            PrepareOptions(inputs=("-",), out=tmp_path / "out2", tokenizer="train:300"),
            html=tmp_path / "absent" / "report.html",
        )
