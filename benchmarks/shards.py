"""Shard sets that benchmarks read: random token ids in documents of real lengths, in a folder that goes away."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from seqmesh.benchmarks.lengths import SEED
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.shard_writer import write_shards

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def scratch_folder(need: int) -> Iterator[Path]:
    """A temporary folder, in memory where `need` bytes are free there: files are then read at the speed of a warm
    page cache, and deleting them is quick."""
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > need
    with tempfile.TemporaryDirectory(prefix="seqmesh-bench-", dir=SHARED_MEMORY if roomy else None) as folder:
        yield Path(folder)


def random_shards(folder: Path, lengths: Int64Array, *, vocab_size: int = 1 << 16, seed: int = SEED) -> Path:
    """Write documents of these lengths, ids drawn evenly from the vocabulary; returns the folder."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, int(lengths.sum()), dtype=np.uint32)
    write_shards(folder, np.split(ids, np.cumsum(lengths)[:-1]), vocab_size=vocab_size)
    return folder
