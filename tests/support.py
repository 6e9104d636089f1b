"""What tests of several rooms share: small shard sets and ways to walk a loader."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from seqmesh.loader.batch import NumpyBatch
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import Draw, StreamState
from seqmesh.packer.lengths import Int64Array
from seqmesh.tools.shard_writer import write_shards

VOCAB = 1000


def documents_of(lengths: Sequence[int], *, vocab: int = VOCAB, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Random token ids for documents of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n) for n in lengths]


def make_set(
    folder: Path,
    lengths: Sequence[int],
    *,
    vocab: int = VOCAB,
    shard_tokens: int = 200,
    sources: Sequence[str] | None = None,
) -> Path:
    """A shard set of random documents, in several small shards. sources: of each document, by default one."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = documents_of(lengths, vocab=vocab)
    write_shards(folder, documents, vocab_size=vocab, shard_tokens=shard_tokens, sources=sources)
    return folder


def rewrite_shard(folder: Path, name: str, batches: list[pa.RecordBatch]) -> None:
    """Replace a shard and make the manifest agree with its size."""
    with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["shards"]:
        if entry["file"] == name:
            entry["bytes"] = (folder / name).stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))


def forget_sources(folder: Path) -> None:
    """Leave the sources of documents in the shards alone, where sets of earlier versions have them."""
    path = folder / "lengths.arrow"
    index = pa.ipc.open_file(str(path)).read_all().drop_columns(["source"])
    path.unlink()
    with pa.ipc.new_file(str(path), index.schema) as writer:
        writer.write_table(index)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["lengths"]["bytes"] = path.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))


def long_tail(count: int, longest: int, *, seed: int = 0) -> list[int]:
    """Lengths from 1 to `longest`, most of them short."""
    rng = np.random.default_rng(seed)
    return [int(n) for n in np.clip(rng.lognormal(2.5, 1.2, count), 1, longest)]


def settings_for(data: Path, **changes: Any) -> LoaderSettings:
    """Small steps over one epoch."""
    defaults: dict[str, Any] = {"data": str(data), "tokens_per_step": 128, "capacity": 64, "epochs": 1, "seed": 0}
    return LoaderSettings(**defaults | changes)


@contextmanager
def killed_after(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill a process at the end of the block, however it ends: a test that fails must not wait for it."""
    try:
        yield
    finally:
        process.kill()


def walk(feed: Feed, rank: int, position: Position | None = None) -> Iterator[tuple[Position, NumpyBatch]]:
    """A rank's batches from a position to the end, each with the position after it."""
    position = position or Position(feed.start)
    while (delivery := feed.deliver(rank, position)) is not None:
        position = delivery.next_position
        yield position, delivery.batch


def every_label(drawn: Draw) -> Int64Array:
    """Supervised tokens of documents where all are, for `next_step`."""
    return np.maximum(drawn.length - 1, 0)


def global_batches(feed: Feed, state: StreamState | None = None) -> list[list[tuple[int, int, int]]]:
    """(document, offset, length) of every step, without regard to ranks."""
    steps = []
    state = state or feed.start
    while (step := feed.step(state)) is not None:
        columns = (step.documents.document, step.documents.offset, step.documents.length)
        steps.append([tuple(row) for row in np.stack(columns, axis=1).tolist()])
        state = step.after
    return steps
