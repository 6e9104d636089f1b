"""Shard sets that benchmarks read: random token ids in documents of real lengths, in a folder that goes away."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seqmesh.benchmarks.lengths import SEED
from seqmesh.loader.manifest import read_manifest
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.shard_writer import DEFAULT_SHARD_TOKENS, ShardWriter

SHARED_MEMORY = Path("/dev/shm")
WRITTEN_AT_ONCE = 1_000  # documents


@contextmanager
def scratch_folder(need: int) -> Iterator[Path]:
    """A temporary folder, in memory where `need` bytes are free there: files are then read at the speed of a warm
    page cache, and deleting them is quick."""
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > need
    with tempfile.TemporaryDirectory(prefix="seqmesh-bench-", dir=SHARED_MEMORY if roomy else None) as folder:
        yield Path(folder)


def random_shards(
    folder: Path,
    lengths: Int64Array,
    *,
    vocab_size: int = 1 << 16,
    seed: int = SEED,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> Path:
    """Write documents of these lengths, ids drawn evenly from the vocabulary; returns the folder. Documents are drawn
    and written a thousand at a time, so that a set may take more memory than there is."""
    generator = np.random.default_rng(seed)
    writer = ShardWriter(folder, vocab_size=vocab_size, tokenizer="none", eod_id=None, shard_tokens=shard_tokens)
    with writer:
        for first in range(0, len(lengths), WRITTEN_AT_ONCE):
            sizes = lengths[first : first + WRITTEN_AT_ONCE]
            ids = generator.integers(0, vocab_size, int(sizes.sum()), dtype=np.uint32)
            names = [str(first + i) for i in range(len(sizes))]
            writer.add(ids, lengths=sizes, doc_ids=names, sources=["all"] * len(sizes))
    return folder


def mapped_ids(folder: Path) -> Iterator[npt.NDArray[Any]]:
    """The token ids of each record batch of a set, memory-mapped."""
    for shard in read_manifest(folder).shards:
        reader = pa.ipc.open_file(pa.memory_map(str(folder / shard.file)))
        for number in range(reader.num_record_batches):
            column: Any = reader.get_batch(number).column("input_ids")
            yield column.values.to_numpy(zero_copy_only=True)
