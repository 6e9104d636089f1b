"""Field case: a tokenizer is used, its threads run, then workers are started. Others hang, or hand over a tokenizer
that has forgotten its settings."""

from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest

from seqmesh.tools.tokenizers.engines import build_engine
from seqmesh.tools.tokenizers.file import TokenizerFile, parse_tokenizer
from seqmesh.tools.tokenizers.training import END_OF_DOCUMENT, train_tokenizer

TEXTS = ["", "short", f"spelled {END_OF_DOCUMENT}", "word and word " * 30_000, "x" * 100_000]
PATIENCE = 60.0  # seconds; a worker that hangs does so for ever


@pytest.fixture(scope="module")
def file() -> TokenizerFile:
    return parse_tokenizer(train_tokenizer(["word and word, short and spelled <|end of text|>"] * 5, 300))


def encode(file: TokenizerFile, name: str, texts: list[str]) -> tuple[list[int], list[int]]:
    ids, lengths = build_engine(file, name, threads=1).encode_flat(texts)
    return ids.tolist(), lengths.tolist()


def test_workers_started_after_use_neither_stall_nor_differ(file: TokenizerFile) -> None:
    expected = build_engine(file, "tokenizers", threads=2).encode_flat(TEXTS * 4)  # its threads run from here on
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for name in ("tokenizers", "tiktoken"):
            jobs = [pool.apply_async(encode, (file, name, TEXTS * 4)) for _ in range(2)]
            for job in jobs:
                ids, lengths = job.get(PATIENCE)
                assert np.array_equal(ids, expected[0])
                assert np.array_equal(lengths, expected[1])


def test_a_tokenizer_arrives_with_its_settings(file: TokenizerFile) -> None:
    again: TokenizerFile = pickle.loads(pickle.dumps(file))
    assert (again.fingerprint, again.eod_id, again.marks) == (file.fingerprint, file.eod_id, 1)
    assert not again.reserved[encode(again, "tokenizers", TEXTS)[0]].any()
