"""Field case: the very first text is empty and an end-of-document token is wanted. Others crash with an index error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seqmesh.loader.manifest import read_manifest
from seqmesh.tools.prepare import PrepareOptions, run
from seqmesh.tools.prepare_report import PrepareReport


def prepared(tmp_path: Path, texts: list[str]) -> PrepareReport:
    """The command as the user runs it: returning is exit code 0."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return run(PrepareOptions(inputs=(str(path),), out=tmp_path / "out", tokenizer="train:300"))


def rows(folder: Path) -> list[Any]:
    return pa.ipc.open_file(str(folder / "shard-00000.arrow")).read_all().column("input_ids").to_pylist()


def test_empty_and_blank_texts_are_counted_and_left_out(tmp_path: Path) -> None:
    counts = prepared(tmp_path, ["", "a b", "   ", "c"]).manifest.counts
    assert (counts["documents_in"], counts["documents_out"], counts["empty"], counts["refused"]) == (4, 2, 2, 0)
    eod = read_manifest(tmp_path / "out").eod_id
    assert [row[-1] for row in rows(tmp_path / "out")] == [eod, eod]


@pytest.mark.parametrize("texts", [["", "   ", "\n\t\u3000"], [""], []])
def test_a_file_of_only_empty_texts_gives_a_valid_shard_without_rows(tmp_path: Path, texts: list[str]) -> None:
    report = prepared(tmp_path, texts)
    assert report.manifest == read_manifest(tmp_path / "out")
    assert [shard.rows for shard in report.manifest.shards] == [0]
    assert report.manifest.counts["empty"] == len(texts)
    assert rows(tmp_path / "out") == []
