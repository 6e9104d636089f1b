"""What tests of commands on shard sets share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from seqmesh.loader.catalog import Reading
from seqmesh.tools.sets.reading import InputSet
from seqmesh.tools.shard_writer import write_shards
from seqmesh.tools.verify import verify_set

VOCAB = 1000
FAST = "/dev/shm" if os.path.isdir("/dev/shm") else None

Row = tuple[str, str, list[int], list[int] | None]


def rows_of(data: Path | str, vocab_size: int | None = None) -> list[Row]:
    """All documents of a set: id, source, token ids, spans."""
    given = InputSet(str(data), Reading(vocab_size=vocab_size))
    found: list[Row] = []
    for block in given.blocks():
        spans = block.spans() or [None] * len(block)
        for one, pairs in zip(block.singles(), spans, strict=True):
            source = given.catalog.sources[int(one.codes[0])]
            flat = None if pairs is None else pairs.ravel().tolist()
            found.append((one.doc_ids[0].as_py(), source, one.ids.tolist(), flat))
    return found


def a_set(folder: Path, count: int, *, name: str = "d", seed: int = 0, **options: Any) -> Path:
    """`count` random documents called d0, d1, ..."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, VOCAB, int(n)) for n in rng.integers(1, 20, count)]
    settings: dict[str, Any] = {"vocab_size": VOCAB, "shard_tokens": 60} | options
    write_shards(folder, documents, doc_ids=[f"{name}{i}" for i in range(count)], **settings)
    return folder


def assert_whole(folder: Path) -> None:
    """Verify finds nothing, not even a warning."""
    assert verify_set(folder) == []


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
