"""The corpus: Python sources of this environment, the same bytes every time, each with its licence."""

from __future__ import annotations

import io
import json
import sysconfig
from email.message import Message
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from seqmesh.tools import corpus
from seqmesh.tools.corpus import SourceFile, build_corpus, find_sources, license_of, run, shuffled


@pytest.fixture(scope="module")
def found() -> list[SourceFile]:
    return find_sources()


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_sources_are_found_with_their_distribution_and_licence(found: list[SourceFile]) -> None:
    by_id = {file.doc_id: file for file in found}
    assert len(by_id) == len(found)
    assert by_id["stdlib/json/decoder.py"].source == "stdlib"
    assert by_id["stdlib/json/decoder.py"].license == "PSF-2.0"
    assert by_id["site-packages/numpy/__init__.py"].source == "numpy"
    assert "BSD" in by_id["site-packages/numpy/__init__.py"].license
    assert not any("site-packages" in name for name in by_id if name.startswith("stdlib/"))


def test_a_corpus_is_reproducible_and_names_no_machine_path(
    tmp_path: Path, found: list[SourceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "find_sources", lambda: found)
    reports = [build_corpus(tmp_path / name / "c.jsonl", seed=3, max_bytes=300_000) for name in ("a", "b")]
    assert reports[0] == reports[1]
    assert (tmp_path / "a" / "c.jsonl").read_bytes() == (tmp_path / "b" / "c.jsonl").read_bytes()
    documents = read(tmp_path / "a" / "c.jsonl")
    sizes = [len(document["text"].encode()) for document in documents]
    assert sum(sizes) == reports[0].bytes >= 300_000 > sum(sizes[:-1])
    assert list(documents[0]) == ["id", "text", "source", "license"]
    assert not any(sysconfig.get_paths()["purelib"] in document["id"] for document in documents)
    licenses = json.loads((tmp_path / "a" / "LICENSES.json").read_text())["sources"]
    assert sum(entry["documents"] for entry in licenses.values()) == len(documents)
    assert {document["source"]: document["license"] for document in documents} == {
        name: entry["license"] for name, entry in licenses.items()
    }


def test_the_seed_changes_the_order(found: list[SourceFile]) -> None:
    assert shuffled(found, 1) == shuffled(reversed(found), 1) != shuffled(found, 2)


def test_duplicates_and_files_without_text_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"a": b"x = 1\n", "b": b"x = 1\n", "c": b" \n", "d": b"# \xe9\n", "e": "é = 2\n".encode()}
    files = []
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        files.append(SourceFile(path=str(tmp_path / name), doc_id=name, source="mine", license="MIT"))
    monkeypatch.setattr(corpus, "find_sources", lambda: files)
    output = io.StringIO()
    report = run(out=tmp_path / "out" / "c.jsonl", console=Console(file=output, width=100))
    assert (report.documents, report.found, report.duplicates, report.empty, report.not_utf8) == (2, 5, 1, 1, 1)
    assert sorted(document["text"] for document in read(tmp_path / "out" / "c.jsonl")) == ["x = 1\n", "é = 2\n"]
    assert "1 duplicates, 1 empty, 1 not UTF-8" in output.getvalue()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([("License-Expression", "MIT"), ("License", "other")], "MIT"),
        ([("License", "BSD")], "BSD"),
        ([("License", "The MIT License\n\nPermission is"), ("Classifier", "License :: OSI Approved :: MIT")], "MIT"),
        ([("License", "The MIT License\n\nPermission is")], "The MIT License"),
        ([("License", "UNKNOWN"), ("Classifier", "License :: A :: X"), ("Classifier", "License :: Y")], "X; Y"),
        ([("License", "p" * 200)], "unknown"),
        ([], "unknown"),
    ],
)
def test_the_licence_is_taken_from_what_the_metadata_say(fields: list[tuple[str, str]], expected: str) -> None:
    metadata = Message()
    for name, value in fields:
        metadata[name] = value
    assert license_of(cast("Any", metadata)) == expected


def test_unfit_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes is 0"):
        build_corpus(tmp_path / "c.jsonl", max_bytes=0)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        build_corpus(tmp_path)
