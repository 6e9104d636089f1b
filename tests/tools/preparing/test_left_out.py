"""Of each source the report says what did not go into the set, in whatever units, by however many runs."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from seqmesh.tools.prepare import PrepareOptions, prepare, run
from seqmesh.tools.prepare_report import Progress
from seqmesh.tools.units import cut


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> tuple[Path, dict[str, Counter[str]]]:
    """Documents of three sources, and what is to be left out of each. Records that are bad have their file's source."""
    rng = random.Random(3)
    lines, expected = [], {"corpus": Counter[str](), **{f"s{n}": Counter[str]() for n in range(3)}}
    for number in range(200):
        source = f"s{rng.randrange(3)}"
        kind = rng.choice(["kept", "kept", "empty", "refused", "too_short", "too_long", "duplicate"])
        text = f"{number} {texts[number % len(texts)][:60]}".ljust(40, ".")
        if kind == "duplicate":
            text = "the same text again, of some twenty tokens or more"
        known = kind == "duplicate" and any(found["met"] for found in expected.values())
        expected[source]["met"] += kind == "duplicate"
        fields = {"text": {"empty": " ", "too_short": "x", "too_long": text * 30}.get(kind, text), "source": source}
        lines.append("not json" if kind == "refused" else json.dumps(fields))
        if kind not in ("kept", "duplicate") or known:
            expected["corpus" if kind == "refused" else source][kind] += 1
    lines += [json.dumps({"text": "", "source": "silent"})]
    expected["silent"] = Counter(empty=1)
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path / "corpus.jsonl", {source: counts - Counter(met=999) for source, counts in expected.items()}


def options_for(corpus: Path, out: Path, tokenizer: Path) -> PrepareOptions:
    rules: dict[str, Any] = {"on_error": "skip", "dedup": True, "min_tokens": 5, "max_document_tokens": 400}
    return PrepareOptions(inputs=(str(corpus),), out=out, tokenizer=str(tokenizer), shard_tokens=250, **rules)


def test_what_is_left_out_is_known_by_source_after_kills_too(
    corpus: tuple[Path, dict[str, Counter[str]]],
    tmp_path: Path,
    tokenizer_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, expected = corpus
    report = prepare(options_for(path, tmp_path / "one", tokenizer_path))
    assert report.left_out == expected
    counts = report.manifest.counts
    total = sum((Counter(found) for found in report.left_out.values()), Counter[str]())
    assert all(counts[name] == count for name, count in total.items()) and len(total) == 5
    assert counts["documents_in"] == counts["documents_out"] + total.total() == 201
    monkeypatch.setattr(cut, "UNIT_BYTES", 800)

    def interrupt(progress: Progress) -> None:
        if progress.tokens - progress.resumed_tokens > 600:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(options_for(path, tmp_path / "two", tokenizer_path), progress=interrupt)
    assert prepare(options_for(path, tmp_path / "two", tokenizer_path)).left_out == expected


def test_the_report_names_sources_of_which_nothing_was_kept(
    corpus: tuple[Path, dict[str, Counter[str]]], tmp_path: Path, tokenizer_path: Path
) -> None:
    path, expected = corpus
    console = Console(file=io.StringIO(), width=120)
    json_file, html = tmp_path / "report.json", tmp_path / "report.html"
    run(options_for(path, tmp_path / "out", tokenizer_path), json_file=json_file, html=html, console=console)
    sources = {source["name"]: source for source in json.loads(json_file.read_text())["sources"]}
    assert {name: source["left_out"] for name, source in sources.items()} == expected
    assert (sources["silent"]["documents"], sources["corpus"]["tokens"]) == (0, 0)
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO
    assert "0 in 0 documents, 1 left out" in shown
    page = html.read_text()
    assert "silent" in page and "<th>too long</th>" in page
