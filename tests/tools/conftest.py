"""Texts and a small tokenizer that the tests of the command line's parts share."""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import textwrap
from pathlib import Path

import pytest

from seqmesh.tools.tokenizers.training import train_tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Real text in documents of uneven length: two modules of the standard library, cut at top-level statements."""
    source = inspect.getsource(textwrap) + inspect.getsource(json.decoder) + inspect.getsource(argparse)
    return [part for part in source.split("\n\n\n") if part.strip()]


@pytest.fixture(scope="session")
def tokenizer_path(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained byte-level BPE tokenizer of 400 entries."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer(texts, 400))
    return path
