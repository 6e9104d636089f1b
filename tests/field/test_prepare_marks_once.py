"""Field case: begin and end marks are asked for, of a tokenizer that adds one itself. Others lose one or double it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.manifest import Manifest
from seqmesh.tools.inspect_set import decoded, read_document
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.tokenizers.training import train_tokenizer
from seqmesh.tools.verify import verify_set

BEGIN, END = "<s>", "<|endoftext|>"
TEXTS = ("one", "two words", "<s> spelled <|endoftext|>", "\n")
TEMPLATES = {"none": "A", "begin": "bA", "end": "Ae", "both": "bAe"}


def tokenizer(path: Path, template: str) -> Path:
    """One that puts these marks around a text of its own accord."""
    config = json.loads(train_tokenizer(["one two words spelled"] * 9, 300))
    begin_id = len(config["model"]["vocab"])
    config["added_tokens"].append({**config["added_tokens"][0], "id": begin_id, "content": BEGIN})
    marks = {"b": (BEGIN, begin_id), "e": (END, 0)}
    special = {token: {"id": token, "ids": [id], "tokens": [token]} for token, id in marks.values()}
    single: list[Any] = [
        {"Sequence": {"id": "A", "type_id": 0}} if c == "A" else {"SpecialToken": {"id": marks[c][0], "type_id": 0}}
        for c in TEMPLATES[template]
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    path.write_text(json.dumps({**config, "post_processor": processor}))
    return path


def prepared(folder: Path, tokenizer: Path, **options: Any) -> Manifest:
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    given = PrepareOptions(inputs=(str(folder / "in.jsonl"),), out=folder / "out", tokenizer=str(tokenizer), **options)
    return prepare(given).manifest


@pytest.mark.parametrize("engine", ["tokenizers", "tiktoken"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_document_has_exactly_one_of_each(tmp_path: Path, template: str, engine: str) -> None:
    file = tokenizer(tmp_path / "tokenizer.json", template)
    manifest = prepared(tmp_path, file, bod_token=BEGIN, eod_token=END, engine=engine)
    begin, end = manifest.bod_id, manifest.eod_id
    assert manifest.documents == 3
    for index in range(3):
        document = read_document(tmp_path / "out", index)
        ids = document.ids.tolist()
        assert (ids[0], ids[-1], ids.count(begin), ids.count(end)) == (begin, end, 1, 1)
        assert decoded(tmp_path / "out", document) == TEXTS[index]
    assert list(verify_set(tmp_path / "out")) == []


@pytest.mark.parametrize(("template", "begins"), [("none", False), ("begin", True), ("end", False), ("both", True)])
def test_auto_begins_documents_as_the_template_does(tmp_path: Path, template: str, begins: bool) -> None:
    manifest = prepared(tmp_path, tokenizer(tmp_path / "tokenizer.json", template), bod_token="auto")
    assert (manifest.bod_id is not None) == begins
    assert (read_document(tmp_path / "out", 0).ids[0] == manifest.bod_id) == begins


def test_no_mark_is_there_unasked(tmp_path: Path) -> None:
    file = tokenizer(tmp_path / "tokenizer.json", "both")
    manifest = prepared(tmp_path, file, bod_token="none", eod_token="none")
    assert (manifest.bod_id, manifest.eod_id) == (None, None)
    assert not {0, 300} & set(read_document(tmp_path / "out", 1).ids.tolist())


def test_the_marks_are_part_of_what_a_set_is_made_of(tmp_path: Path) -> None:
    file = tokenizer(tmp_path / "tokenizer.json", "both")
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    options: tuple[dict[str, Any], ...] = ({}, {"bod_token": BEGIN}, {"parse_special": True, "eod_token": "none"})
    prints = {prepared(folder, file, **given).tokenizer for folder, given in zip(folders, options, strict=True)}
    assert len(prints) == 3
