"""What commands share that write documents of shard sets to new ones, document by document."""

from __future__ import annotations

from pathlib import Path

from seqmesh.loader.manifest import Manifest
from seqmesh.tools.shard_writer import ShardWriter


def writer_like(manifest: Manifest, folder: Path, shard_tokens: int) -> ShardWriter:
    """For a set of the same tokenizer. Raises ValueError for an unfit number of tokens."""
    return ShardWriter(
        folder,
        vocab_size=manifest.vocab_size,
        tokenizer=manifest.tokenizer,
        eod_id=manifest.eod_id,
        bod_id=manifest.bod_id,
        shard_tokens=shard_tokens,
    )
