"""Tokenizer files: trained the same way every time, and text never turns into special tokens or gets cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from seqmesh.tools.tokenizers.engine import flat, split_flat
from seqmesh.tools.tokenizers.engines import reference_engine
from seqmesh.tools.tokenizers.file import TokenizerFile, add_marks, decode, load_tokenizer, parse_tokenizer
from seqmesh.tools.tokenizers.training import END_OF_DOCUMENT, train_size, train_tokenizer


def changed(path: Path, **fields: Any) -> bytes:
    """The tokenizer file with some fields set."""
    return json.dumps({**json.loads(path.read_bytes()), **fields}).encode()


def encode(file: TokenizerFile, text: str) -> list[int]:
    ids: list[int] = reference_engine(file).encode([text])[0].tolist()
    return ids


def test_any_text_decodes_to_itself(tokenizer_path: Path) -> None:
    file = load_tokenizer(tokenizer_path)
    for text in ("héllo  wörld\n\t", "日本語 👩‍👩‍👧", "\x00\x7f\ufeff", "x" * 1000, f"a{END_OF_DOCUMENT}b"):
        ids = encode(file, text)
        assert decode(file, np.array([*ids, file.eod_id])) == text


def test_the_literal_end_token_in_text_stays_text(tokenizer_path: Path) -> None:
    file = load_tokenizer(tokenizer_path)
    assert file.eod_id == 0
    assert 0 not in encode(file, f"before {END_OF_DOCUMENT} after")
    assert file.reserved.nonzero()[0].tolist() == [0]


def test_training_gives_the_same_bytes_whatever_the_threads(texts: list[str], tmp_path: Path) -> None:
    script = (
        "import sys, json, xxhash\n"
        "from seqmesh.tools.tokenizers.training import train_tokenizer\n"
        "print(xxhash.xxh3_128_hexdigest(train_tokenizer(json.load(open(sys.argv[1])), 400)))\n"
    )
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    digests = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "texts.json")],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "3")
    }
    assert len(digests) == 1


def test_training_on_nothing_gives_bytes_and_the_end_token() -> None:
    assert parse_tokenizer(train_tokenizer([], 5000)).vocab_size == 257


def test_the_fingerprint_covers_bytes_and_options_that_change_tokens(tokenizer_path: Path, texts: list[str]) -> None:
    file = load_tokenizer(tokenizer_path)
    assert load_tokenizer(tokenizer_path).fingerprint == file.fingerprint
    assert load_tokenizer(tokenizer_path, eod_token="none").fingerprint != file.fingerprint
    assert parse_tokenizer(train_tokenizer(texts[1:], 400)).fingerprint != file.fingerprint


def test_truncation_and_padding_that_a_file_asks_for_are_switched_off(tokenizer_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END_OF_DOCUMENT,
    }
    plain = load_tokenizer(tokenizer_path)
    text = "one two three four five six seven eight"
    for fields in ({"truncation": cut}, {"padding": fill}):
        assert encode(parse_tokenizer(changed(tokenizer_path, **fields)), text) == encode(plain, text)


def test_marks_that_a_post_processor_adds_are_left_out(tokenizer_path: Path) -> None:
    special = {END_OF_DOCUMENT: {"id": END_OF_DOCUMENT, "ids": [0], "tokens": [END_OF_DOCUMENT]}}
    mark = {"SpecialToken": {"id": END_OF_DOCUMENT, "type_id": 0}}
    single = [mark, {"Sequence": {"id": "A", "type_id": 0}}, mark]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    file = parse_tokenizer(changed(tokenizer_path, post_processor=processor))
    assert isinstance(file.tokenizer, Tokenizer)
    assert file.tokenizer.encode("text").ids[-1] == 0  # the file does add it
    assert 0 not in encode(file, "text")


def test_a_template_that_begins_with_several_tokens_wants_one_named(tokenizer_path: Path) -> None:
    special = {END_OF_DOCUMENT: {"id": END_OF_DOCUMENT, "ids": [0], "tokens": [END_OF_DOCUMENT]}}
    mark = {"SpecialToken": {"id": END_OF_DOCUMENT, "type_id": 0}}
    single = [mark, mark, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    with pytest.raises(ValueError, match="puts 2 tokens before a text"):
        parse_tokenizer(changed(tokenizer_path, post_processor=processor), bod_token="auto")


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 399), max_size=5), max_size=8),
    begin=st.sampled_from(["none", END_OF_DOCUMENT]),
    end=st.sampled_from(["none", END_OF_DOCUMENT]),
)
def test_marks_go_around_every_document(documents: list[list[int]], begin: str, end: str, tokenizer_path: Path) -> None:
    file = load_tokenizer(tokenizer_path, bod_token=begin, eod_token=end)
    ids, lengths = add_marks(*flat([np.array(row, np.uint32) for row in documents]), file)
    expected = [[0] * (begin != "none") + row + [0] * (end != "none") for row in documents]
    assert [row.tolist() for row in split_flat(ids, lengths)] == expected
    assert ids.size == lengths.sum()


def test_random_merges_are_refused(tokenizer_path: Path) -> None:
    model = json.loads(tokenizer_path.read_bytes())["model"] | {"dropout": 0.1}
    with pytest.raises(ValueError, match="BPE dropout"):
        parse_tokenizer(changed(tokenizer_path, model=model))


def test_the_end_token_is_named_or_refused(tokenizer_path: Path) -> None:
    assert load_tokenizer(tokenizer_path, eod_token=END_OF_DOCUMENT).eod_id == 0
    assert load_tokenizer(tokenizer_path, eod_token="none").eod_id is None
    with pytest.raises(ValueError, match=r"no special token '</s>'.*<\|endoftext\|>"):
        load_tokenizer(tokenizer_path, eod_token="</s>")
    with pytest.raises(ValueError, match="no end-of-document token that is known"):
        parse_tokenizer(changed(tokenizer_path, added_tokens=[]))


def test_files_that_are_no_tokenizer_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="is a folder: give the file"):
        load_tokenizer(tmp_path)
    (tmp_path / "junk").write_bytes(b"\xff{}")
    with pytest.raises(ValueError, match=r"junk is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "junk")


def test_the_training_size_is_read_from_the_option() -> None:
    assert train_size("train:8192") == 8192
    assert train_size("some/tokenizer.json") is None
    for spec in ("train:", "train:12", "train:many", "train:-300"):
        with pytest.raises(ValueError, match="at least 257"):
            train_size(spec)
