"""Field case: one document of 500,000 words. Others take a hundred times as long for it as for 50,000."""

from __future__ import annotations

import time

import pytest

from seqmesh.tools.tokenizers.engine import Engine
from seqmesh.tools.tokenizers.engines import build_engine
from seqmesh.tools.tokenizers.file import TokenizerFile, parse_tokenizer
from seqmesh.tools.tokenizers.patterns import GPT2, PIECE_CHARACTERS, cut_text
from seqmesh.tools.tokenizers.training import train_tokenizer

WORDS = ["the", "quick", "brown", "fox", "isn't", "42", "years", "old\n"]


def document(words: int) -> str:
    return " ".join(WORDS[i % len(WORDS)] + str(i % 97) for i in range(words))


@pytest.fixture(scope="module")
def file() -> TokenizerFile:
    return parse_tokenizer(train_tokenizer([document(2000)], 400))


@pytest.mark.parametrize("name", ["tokenizers", "tiktoken"])
def test_time_per_token_does_not_grow_with_the_document(file: TokenizerFile, name: str) -> None:
    engine = build_engine(file, name, threads=1)
    short, long = (min(seconds_a_token(engine, document(words)) for _ in range(2)) for words in (50_000, 500_000))
    assert long < 3 * short


def seconds_a_token(engine: Engine, text: str) -> float:
    started = time.process_time()
    (ids,) = engine.encode([text])
    return (time.process_time() - started) / len(ids)


def test_work_is_done_in_pieces_of_bounded_size() -> None:
    text = document(500_000)
    pieces = cut_text(text, GPT2.cut)
    longest = max(map(len, WORDS)) + 3
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARACTERS + longest
    assert len(pieces) <= len(text) / PIECE_CHARACTERS + 1
