"""Readers on damaged and odd inputs, for a few seconds; `make fuzz` does the same for longer."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.tools.inputs import find_files
from seqmesh.tools.records import Columns
from tests.tools.reading.fuzzing import LINES, check_any, check_lines, check_seed

CORPUS = Path(__file__).with_name("corpus")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.iterdir()))
def test_what_was_found_once(name: str) -> None:
    check_any(find_files([str(CORPUS / name)])[0], Columns())


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 1 << 48))
def test_any_case(folder: Path, seed: int) -> None:
    check_seed(seed, folder)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300) | st.lists(st.sampled_from(LINES)).map(b"\n".join), seed=st.integers(0, 1 << 48))
def test_any_bytes_are_lines(folder: Path, data: bytes, seed: int) -> None:
    (folder / "in.jsonl").write_bytes(data)
    (file,) = find_files([str(folder / "in.jsonl")])
    check_lines(file, data, Columns(), random.Random(seed))


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300), name=st.sampled_from(["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst"]))
def test_any_bytes_are_read_or_refused_by_name(folder: Path, data: bytes, name: str) -> None:
    (folder / name).write_bytes(data)
    check_any(find_files([str(folder / name)])[0], Columns())
