"""Field case: one bad line ends a long job without saying where, or disappears without a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seqmesh.loader.manifest import MANIFEST_NAME, read_manifest
from seqmesh.tools.prepare import PrepareOptions, run

LINES = [
    b'{"text": "good"}\n',
    b'{"text":"a"}{"text":"b"}\n',
    b'{"text": "\xff"}\n',
    b'{"text": 5}\n',
    b'{"text": "good too"}\n',
    b'{"text": "cut in the mid',
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(LINES))
    return path


def test_the_first_bad_line_stops_the_job_and_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(
        ValueError, match=rf"{source}, line 2 \(byte offset {len(LINES[0])}\): more than one JSON value"
    ):
        run(PrepareOptions(inputs=(str(source),), out=out, tokenizer="train:300"))
    assert not (out / MANIFEST_NAME).exists()
    assert not list(out.glob("*.arrow"))


def test_skipped_lines_are_kept_aside_with_reasons_and_counted(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(PrepareOptions(inputs=(str(source),), out=out, tokenizer="train:300", on_error="skip"))
    counts = read_manifest(out).counts
    assert (counts["documents_in"], counts["documents_out"], counts["empty"], counts["refused"]) == (6, 2, 0, 4)
    entries = [json.loads(line) for line in (out / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()]
    offsets = [sum(map(len, LINES[:index])) for index in range(len(LINES))]
    assert [(entry["line"], entry["offset"]) for entry in entries] == [(n + 1, offsets[n]) for n in (1, 2, 3, 5)]
    reasons = ("more than one JSON value", "invalid UTF-8", "text is a number", "cut off")
    assert all(reason in entry["reason"] for entry, reason in zip(entries, reasons, strict=True))
    assert entries[1]["raw"] == '{"text": "\\xff"}\n'
