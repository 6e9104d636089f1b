"""Field case: text spells the end-of-document or an image marker. Others store the reserved id, or lose the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seqmesh.tools.inspect_set import decoded, read_document
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.tokenizers.engines import ENGINES
from seqmesh.tools.tokenizers.training import train_tokenizer
from seqmesh.tools.verify import verify_set

END, IMAGE, SMALL = "<|endoftext|>", "<|image|>", "<|im|>"
TEXTS = (f"{END}", f"a{END}{END} b", f"see {IMAGE}: {SMALL}{IMAGE}\n{END}", f"{IMAGE[:-1]} {END[1:]}|> plain")
PLAIN = [engine for engine in ENGINES if engine in ("tokenizers", "tiktoken", "auto")]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A byte-level tokenizer whose markers are special tokens, one of them part of no other."""
    config = json.loads(train_tokenizer([*TEXTS, "see the end of a plain text"] * 9, 300))
    first = config["added_tokens"][0]
    size = len(config["model"]["vocab"])
    config["added_tokens"] += [{**first, "id": size + i, "content": token} for i, token in enumerate((IMAGE, SMALL))]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(config))
    return path


def prepared(tmp_path: Path, tokenizer: Path, texts: tuple[str, ...], **options: Any) -> Path:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(PrepareOptions(inputs=(str(source),), out=tmp_path / "out", tokenizer=str(tokenizer), **options))
    return tmp_path / "out"


@pytest.mark.parametrize("engine", PLAIN)
def test_spelled_markers_are_text_and_come_back_as_text(tmp_path: Path, tokenizer: Path, engine: str) -> None:
    out = prepared(tmp_path, tokenizer, TEXTS, engine=engine)
    reserved = {token["id"] for token in json.loads(tokenizer.read_text())["added_tokens"]}
    for index, text in enumerate(TEXTS):
        document = read_document(out, index)
        assert decoded(out, document) == text
        ids = document.ids.tolist()
        assert ids[-1] == 0
        assert not reserved & set(ids[:-1])


def test_asked_for_they_are_tokens_and_the_set_remembers(tmp_path: Path, tokenizer: Path) -> None:
    text = f"see {IMAGE}: {SMALL}{IMAGE}"
    out = prepared(tmp_path, tokenizer, (text,), parse_special=True)
    ids = read_document(out, 0).ids.tolist()
    image = json.loads(tokenizer.read_text())["added_tokens"][1]["id"]
    assert ids.count(image) == 2
    assert ids.count(image + 1) == 1
    assert decoded(out, read_document(out, 0)) == text
    assert list(verify_set(out)) == []


def test_asked_for_the_mark_itself_is_refused_in_text(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(ValueError, match=r"the special token '<\|endoftext\|>': it would end or begin twice"):
        prepared(tmp_path, tokenizer, TEXTS, parse_special=True)


def test_text_that_brings_its_marks_needs_none_of_ours(tmp_path: Path, tokenizer: Path) -> None:
    out = prepared(tmp_path, tokenizer, (f"a{END}",), parse_special=True, eod_token="none")
    assert read_document(out, 0).ids.tolist().count(0) == 1
