"""Files of ranks: the tokenizer.json that they become gives the ids that tiktoken gives."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.tools.inspect_set import decoded, read_document
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.tokenizers.byte_level import merge_ranks
from seqmesh.tools.tokenizers.engines import reference_engine
from seqmesh.tools.tokenizers.file import TokenizerFile, load_tokenizer, parse_tokenizer
from seqmesh.tools.tokenizers.patterns import PATTERNS
from seqmesh.tools.tokenizers.tiktoken_file import converted
from seqmesh.tools.verify import verify_set
from tests.tools.tokenizers.samples import trained

FAST = {pattern.name: pattern.fast for pattern in PATTERNS}
NAMES = ("gpt2", "cl100k", "o200k", "llama3")
WORDS = [
    "aaaa abab ababab aaaaaaa banana bananana",
    "    \t\t  \n\n\n ====== ---==--== 12 123 1212121",
    "it's we're",
] * 4


@cache
def ranks(name: str) -> dict[bytes, int]:
    """Of a small vocabulary, with the merges of runs, where the order of merging matters most."""
    found = merge_ranks(json.loads(trained(WORDS, name, vocab_size=340)))
    return {token: rank for rank, token in enumerate(found)}


def rank_file(table: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in table.items())


@cache
def both(name: str) -> tuple[TokenizerFile, tiktoken.Encoding]:
    file = parse_tokenizer(converted(rank_file(ranks(name)), name="x.tiktoken", pattern=name))
    return file, tiktoken.Encoding(name, pat_str=FAST[name], mergeable_ranks=ranks(name), special_tokens={})


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), text=st.text(alphabet="ab n=-\t\n12's.é", max_size=60) | st.text(max_size=30))
def test_a_converted_file_gives_the_ids_of_tiktoken(name: str, text: str) -> None:
    file, encoding = both(name)
    assert reference_engine(file).encode([text])[0].tolist() == encoding.encode_ordinary(text)


def test_special_tokens_keep_their_ids_gaps_included(tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(rank_file(ranks("cl100k")))
    known = load_tokenizer(path, pattern="cl100k")
    assert (known.eod_id, known.vocab_size) == (100257, 100277)
    assert known.tokenizer.id_to_token(100260) == "<|fim_suffix|>"
    own = load_tokenizer(path, pattern=FAST["cl100k"], special=("<end>=900", "<a=b>=700"), eod_token="<end>")
    assert (own.eod_id, own.vocab_size) == (900, 901)
    assert own.tokenizer.id_to_token(700) == "<a=b>"
    assert own.reserved.nonzero()[0].tolist() == [700, 900]


def test_a_set_from_ranks_holds_a_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "x.tiktoken").write_bytes(rank_file(ranks("llama3")))
    text = "<|end_of_text|> banana 12345\n \n"
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text}) + "\n")
    options = PrepareOptions(
        inputs=(str(tmp_path / "in.jsonl"),),
        out=tmp_path / "out",
        tokenizer=str(tmp_path / "x.tiktoken"),
        pattern="llama3",
        bod_token="<|begin_of_text|>",
    )
    manifest = prepare(options).manifest
    assert (manifest.bod_id, manifest.eod_id) == (128000, 128001)
    document = read_document(tmp_path / "out", 0)
    assert decoded(tmp_path / "out", document) == text
    encoding = both("llama3")[1]
    assert document.ids.tolist() == [128000, *encoding.encode_ordinary(text), 128001]
    assert list(verify_set(tmp_path / "out")) == []


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (b"IQ== 0\nIg==\n", {}, r"x, line 2 is not a token in base64 and its rank: b'Ig=='"),
        (b"IQ== 0\nI!== 1\n", {}, "x, line 2"),
        (b"IQ== 0\nIg== 0\n", {}, "one rank to several"),
        (b"IQ== 0\nIg== 1\n", {}, "lacks 254 of the 256 single bytes, such as 0"),
        (None, {"special": ("<end>",)}, "special is '<end>': must be a token and its id"),
        (None, {"special": ("<end>=5",)}, "the id 5 of the special token '<end>'.*another vocabulary"),
        (None, {"special": ("<a>=900", "<b>=900")}, "two special tokens have the same id"),
        (None, {"pattern": "(a"}, "not a regular expression that tiktoken reads"),
        (None, {"pattern": r"\w+"}, "cannot be written as a tokenizer.json: the ids differ"),
    ],
)
def test_what_does_not_fit_is_refused(data: bytes | None, options: dict[str, object], message: str) -> None:
    given = {"pattern": "gpt2", **options}
    with pytest.raises(ValueError, match=message):
        converted(data or rank_file(ranks("gpt2")), name="x", **given)  # type: ignore[arg-type]  # a dict of options


def test_ranks_want_a_pattern_and_other_files_none(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "x").write_bytes(rank_file(ranks("gpt2")))
    with pytest.raises(ValueError, match="say by which pattern text is split"):
        load_tokenizer(tmp_path / "x")
    with pytest.raises(ValueError, match=r"belong to files of tiktoken's ranks, which .* is not"):
        load_tokenizer(tokenizer_path, pattern="gpt2")
