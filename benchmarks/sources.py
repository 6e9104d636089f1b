"""`seqmesh bench sources`: other formats, and data at URLs, beside shard sets on the disk.

The same documents in every format the loader reads. One pass over all batches of each is timed in this process, after
the first has brought what is decoded into the cache; in turns. Cold starts are timed from nothing to the first batch:
an empty cache, a storage over HTTP on loopback, in a process of its own; they end in memory, so bandwidth and delays of
a real storage come on top, and what counts is how many bytes had to come first (`fetched`).

    source_rate_vs_shards   million tokens per CPU-second, beside those of the shard set
    cold_start_vs_local     seconds to the first batch, beside those of the shard set on the disk
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqmesh.benchmarks.harness import Results, Row, Spread, chosen_peers, interleave, measure, ratio, row
from seqmesh.benchmarks.lengths import python_documents
from seqmesh.benchmarks.range_server import serving
from seqmesh.benchmarks.shards import random_shards, scratch_folder
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.formats.megatron import DTYPES, MAGIC
from seqmesh.loader.gather import Int32Array
from seqmesh.loader.settings import Blocks, LoaderSettings
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.storage.cache import Cache

PEERS: tuple[str, ...] = ()
CAPACITY = 1 << 17
VOCABULARY = 1 << 17
FILES = 16
BLOCKS = Blocks(window=2)  # files
SHARDS, PARQUET, ARROW, MEGATRON = "shard set", "parquet", "huggingface", "megatron"
LOCAL = "shard set, here"


def run(*, quick: bool, against: tuple[str, ...] = ()) -> Results:
    """Write the documents in every format and read them."""
    chosen_peers(PEERS, against)
    tokens, repeats = (1 << 24, 3) if quick else (1 << 27, 5)
    lengths = python_documents(tokens, CAPACITY)
    with scratch_folder(24 * tokens) as scratch:
        random_shards(scratch / "set", lengths, vocab_size=VOCABULARY, shard_tokens=tokens // FILES)
        places = {SHARDS: scratch / "set"} | written(scratch, ShardSet(scratch / "set"))
        return rates(places, scratch / "cache", repeats) + starts(places, scratch, repeats)


def written(scratch: Path, shards: ShardSet) -> dict[str, Path]:
    """The documents of a set in the other formats, in as many files."""
    places = {name: scratch / name for name in (PARQUET, ARROW, MEGATRON)}
    for place in places.values():
        place.mkdir()
    names = [f"data-{number:05d}.arrow" for number in range(FILES)]
    edges = [len(shards) * number // FILES for number in range(FILES + 1)]
    for number, (first, last) in enumerate(pairwise(edges)):
        ids = np.concatenate([shards.tokens(document) for document in range(first, last)]).astype(np.int32)
        offsets = np.concatenate(([0], np.cumsum(shards.lengths[first:last]))).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids, pa.int32()))
        table = pa.table({"input_ids": lists})
        pq.write_table(table, places[PARQUET] / f"part-{number:05d}.parquet")
        with pa.ipc.new_stream(str(places[ARROW] / names[number]), table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
        _write_megatron(places[MEGATRON] / f"part-{number:05d}", ids, offsets)
    (places[ARROW] / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return places


def _write_megatron(prefix: Path, ids: Int32Array, offsets: Int32Array) -> None:
    count = len(offsets) - 1
    code = next(code for code, dtype in DTYPES.items() if dtype == np.int32)
    head = MAGIC + (1).to_bytes(8, "little") + bytes([code]) + np.array([count, count + 1], np.int64).tobytes()
    columns = np.diff(offsets), offsets[:-1].astype(np.int64) * ids.itemsize, np.arange(count + 1, dtype=np.int64)
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    prefix.with_suffix(".idx").write_bytes(head + b"".join(column.tobytes() for column in columns))


def _settings_at(place: Path | str, shuffle: bool | Blocks = True) -> LoaderSettings:
    return LoaderSettings(
        data=str(place),
        vocab_size=VOCABULARY,
        tokens_per_step=CAPACITY,
        capacity=CAPACITY,
        epochs=1,
        seed=0,
        shuffle=shuffle,
        fields=(),
    )


def rates(places: dict[str, Path], folder: Path, repeats: int) -> Results:
    """Whole passes, in turns."""
    feeds = {name: Feed(_settings_at(place), cache=Cache(folder=folder)) for name, place in places.items()}
    tokens = int(feeds[SHARDS].shards.lengths.sum())
    spreads = measure({name: partial(_pass, feed) for name, feed in feeds.items()}, repeats)
    rows = {
        name: row("format", name, spread.rate(tokens / 1e6), "Mtok/CPU-s", tokens=tokens)
        for name, spread in spreads.items()
    }
    ratios = tuple(ratio("source_rate_vs_shards", rows[name], rows[SHARDS]) for name in rows if name != SHARDS)
    return Results(rows=tuple(rows.values()), ratios=ratios)


def _pass(feed: Feed) -> None:
    """Order, plans and all batches, to memory that is used again."""
    block, position = np.empty(8 * CAPACITY, np.uint8), Position(feed.start)
    while (draft := feed.draft(0, position)) is not None:
        draft.write(block)
        position = draft.next_position


def starts(places: dict[str, Path], scratch: Path, repeats: int) -> Results:
    """From an empty cache to the first batch, and from a full one."""
    with serving(scratch) as url:
        remote = {f"{name}, URL": f"{url}/{place.name}" for name, place in places.items()}
        some = {LOCAL: _settings_at(places[SHARDS], BLOCKS)}
        some |= {name: _settings_at(place, BLOCKS) for name, place in remote.items()}
        candidates: dict[str, Callable[[], tuple[float, int]]] = {
            name: partial(_cold, settings, scratch) for name, settings in some.items()
        }
        everything = _settings_at(remote[f"{SHARDS}, URL"])
        candidates[f"{SHARDS}, URL, shuffled globally"] = partial(_cold, everything, scratch)
        candidates[f"{SHARDS}, URL, from the cache"] = partial(_warm, some[f"{SHARDS}, URL"], scratch)
        found = interleave(candidates, repeats)
    rows = {name: _start_row(name, results) for name, results in found.items()}
    ratios = tuple(ratio("cold_start_vs_local", rows[name], rows[LOCAL]) for name in rows if name != LOCAL)
    return Results(rows=tuple(rows.values()), ratios=ratios)


def _cold(settings: LoaderSettings, scratch: Path) -> tuple[float, int]:
    """Seconds, and bytes in the cache by then."""
    folder = scratch / f"cold-{time.monotonic_ns()}"
    return _start(settings, folder)


def _warm(settings: LoaderSettings, scratch: Path) -> tuple[float, int]:
    folder = scratch / "warm"
    _start(settings, folder)
    return _start(settings, folder)


def _start(settings: LoaderSettings, folder: Path) -> tuple[float, int]:
    begin = time.perf_counter()
    feed = Feed(settings, cache=Cache(folder=folder))
    feed.deliver(0, Position(feed.start))
    seconds = time.perf_counter() - begin
    fetched = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
    feed.shards.close()
    return seconds, fetched


def _start_row(name: str, results: list[tuple[float, int]]) -> Row:
    seconds = Spread.of([each for each, _ in results])
    return row("first batch", name, seconds, "s", fetched=max(fetched for _, fetched in results))
