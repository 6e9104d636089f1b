"""Data at a URL gives the batches of the same data on the disk: whatever the storage, format, and state of the link."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqmesh.loader.ahead import needed_at_once
from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.errors import RemoteError, ShardError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import Blocks, LoaderSettings
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.state import StreamState
from seqmesh.loader.storage.cache import Cache
from seqmesh.loader.storage.copies import FOLDER
from seqmesh.tools.shard_writer import write_shards
from tests.formats import write_all
from tests.serving import SECONDS, served_here
from tests.storage import BUCKET, http_server, link_to, s3_server, s3_settings
from tests.support import VOCAB, documents_of, long_tail, settings_for, walk

DOCUMENTS = documents_of(long_tail(60, 120))
ROWS = {"tokens_per_step": None, "batching": "rows", "rows_per_step": 2, "window": 9}
CHANGES = {"vocab_size": VOCAB, "max_document": 120, "capacity": 120}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("formats"), DOCUMENTS, vocab=VOCAB)


def settings_at(url: str | Path, **changes: Any) -> LoaderSettings:
    return replace(settings_for(Path(), **CHANGES | changes), data=str(url))


def digests(settings: LoaderSettings, cache: Cache) -> list[str]:
    feed = Feed(settings, cache=cache)
    try:
        return [batch_digest(batch) for _, batch in walk(feed, 0)]
    finally:
        feed.shards.close()


def uploaded(places: dict[str, Path], system: Any, root: str) -> dict[str, str]:
    """The same data in a storage: its place there by format."""
    found = {}
    for name, place in places.items():
        folder = place.parent if name == "megatron" else place
        for file in folder.iterdir():
            system.pipe_file(f"{root}/{name}/{file.name}", file.read_bytes())
        found[name] = f"{root}/{name}/{place.name}" if name == "megatron" else f"{root}/{name}"
    return found


@pytest.fixture
def memory(places: dict[str, Path]) -> Iterator[dict[str, str]]:
    system = fsspec.filesystem("memory")
    yield {name: f"memory:/{path}" for name, path in uploaded(places, system, "/sets").items()}
    system.rm("/sets", recursive=True)


def test_all_formats_in_memory_and_at_file_urls(
    places: dict[str, Path], memory: dict[str, str], tmp_path: Path
) -> None:
    expected = digests(settings_at(places["seqmesh"]), Cache(folder=tmp_path))
    for name, url in memory.items():
        cache = Cache(folder=tmp_path / name)
        assert digests(settings_at(url), cache) == expected, name
        assert digests(settings_at(url), cache) == expected, name  # from the copies
        assert digests(settings_at(f"file://{places[name]}"), cache) == expected, name


def test_a_server_that_lists_nothing(places: dict[str, Path], tmp_path: Path) -> None:
    folder = places["seqmesh"].parent
    table = pa.concat_tables([pq.read_table(path) for path in sorted(places["parquet"].iterdir())])
    pq.write_table(table, folder / "all.parquet")
    expected = digests(settings_at(places["seqmesh"]), Cache(folder=tmp_path))
    with http_server(folder, lists=False) as port:
        for name in ("shards", "all.parquet", "megatron/text_document", "megatron/text_document.bin"):
            settings = settings_at(f"http://127.0.0.1:{port}/{name}")
            assert digests(settings, Cache(folder=tmp_path / "cache")) == expected, name
        with pytest.raises(FileNotFoundError, match="is not a finished shard set"):
            Feed(settings_at(f"http://127.0.0.1:{port}/parquet"), cache=Cache(folder=tmp_path / "cache"))


def test_what_is_not_there_is_said(memory: dict[str, str], tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="memory://sets/nothing is not a finished shard set"):
        Feed(settings_at("memory://sets/nothing"), cache=cache)
    feed = Feed(settings_at(memory["seqmesh"]), cache=cache)
    fsspec.filesystem("memory").rm("/sets/seqmesh/shard-00001.arrow")
    with pytest.raises(ShardError, match=r"shard-00001.arrow: there is no such file"):
        list(walk(feed, 0))
    feed.shards.close()


def test_shards_that_are_not_there_or_cut_are_refused_at_start_or_left_out(
    memory: dict[str, str], tmp_path: Path
) -> None:
    cache, system = Cache(folder=tmp_path), fsspec.filesystem("memory")
    system.rm("/sets/seqmesh/shard-00001.arrow")
    with pytest.raises(ShardError, match=r"memory://.*shard-00001.arrow: is missing; the manifest lists it"):
        Feed(settings_at(memory["seqmesh"]), cache=cache)
    system.pipe_file("/sets/seqmesh/shard-00001.arrow", b"cut")
    with pytest.raises(ShardError, match=r"shard-00001.arrow: has 3 bytes, the manifest says \d+"):
        Feed(settings_at(memory["seqmesh"]), cache=cache)
    feed = Feed(settings_at(memory["seqmesh"], bad_shards="quarantine"), cache=cache)
    assert list(feed.shards.bad_shards) == ["shard-00001.arrow"]
    first, last = feed.shards.part_first[1:3].tolist()
    served = {document for _, batch in walk(feed, 0) for document in batch.document_ids.tolist()}
    assert served == set(range(len(DOCUMENTS))) - set(range(first, last))
    feed.shards.close()


def test_a_damaged_object_is_found_by_its_checksum(memory: dict[str, str], tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    data = system.cat_file("/sets/seqmesh/shard-00001.arrow")
    system.pipe_file("/sets/seqmesh/shard-00001.arrow", data[:700] + bytes([data[700] ^ 1]) + data[701:])
    feed = Feed(settings_at(memory["seqmesh"]), cache=Cache(folder=tmp_path))
    with pytest.raises(RemoteError, match=r"shard-00001.arrow: its checksum is not \w+, twice"):
        list(walk(feed, 0))
    feed.shards.close()


def test_a_cache_that_is_too_small_is_refused_at_start(memory: dict[str, str], tmp_path: Path) -> None:
    sizes = sorted(part.kept for part in ShardSet(memory["seqmesh"], cache=Cache(folder=tmp_path)).catalog.parts)
    with pytest.raises(ValueError, match=f"cache_bytes is {sum(sizes) - 1}: memory.* needs {sum(sizes)} for copies"):
        Feed(settings_at(memory["seqmesh"]), cache=Cache(folder=tmp_path, limit=sum(sizes) - 1))
    with pytest.raises(
        ValueError, match=f"cache_bytes is {sizes[-1] - 1}: the copy of memory.*arrow takes {sizes[-1]}"
    ):
        Feed(settings_at(memory["seqmesh"]), cache=Cache(folder=tmp_path, limit=sizes[-1] - 1))


def test_ranks_are_heard_while_parts_are_fetched_and_told_what_can_not_be(
    memory: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_at(memory["seqmesh"], ranks=2)
    expected = [[batch_digest(batch) for _, batch in walk(Feed(settings), rank)] for rank in range(2)]
    endpoint = f"ipc://{tmp_path}/loader"
    with served_here(settings, endpoint):
        client = Client(endpoint, rank=1, credit=1 << 20, timeout=SECONDS)
        client.subscribe(Position(Feed(settings).start))
        taken = []
        while (delivery := client.next()) is not None:
            taken.append(batch_digest(delivery.batch))
            del delivery
        assert taken == expected[1]
        client.close()


def bytes_in(folder: Path) -> int:
    """Of whole copies. One that is removed meanwhile has made room."""
    sizes = []
    for path in folder.glob("*.arrow"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def test_an_object_store_over_a_link_that_is_cut(places: dict[str, Path], tmp_path: Path) -> None:
    expected = {rank: inline(settings_at(places["seqmesh"], ranks=2), rank) for rank in range(2)}
    with s3_server() as server, link_to(server) as link, s3_settings(server) as _:
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir(BUCKET)
        urls = uploaded(places, system, BUCKET)
        with s3_settings(link.port) as environment, pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            for number, name in enumerate(("seqmesh", "parquet", "megatron")):
                link.cuts, link.limit = 1, 300 + 700 * number
                options = ServeOptions(cache=str(tmp_path / name))
                with LoaderProcess(settings_at(f"s3://{urls[name]}", ranks=2), options=options) as process:
                    for rank in range(2):
                        assert read(process.endpoint, rank) == expected[rank], name
            assert link.was_cut == 3


def inline(settings: LoaderSettings, rank: int) -> list[str]:
    return [batch_digest(batch) for _, batch in walk(Feed(settings), rank)]


def read(endpoint: str, rank: int) -> list[str]:
    client = Client(endpoint, rank=rank, credit=1 << 20, timeout=60)
    state = client.welcome().state
    client.subscribe(Position(StreamState.from_dict(state)))
    found = []
    while (delivery := client.next()) is not None:
        found.append(batch_digest(delivery.batch))
        del delivery
    client.close()
    return found


@pytest.mark.parametrize(
    "changes", [{}, {"tokens_per_step": None, "batching": "rows", "rows_per_step": 2, "window": 9}]
)
def test_a_shuffle_by_blocks_needs_room_for_two_windows_and_fetches_each_file_once_an_epoch(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    documents = documents_of(long_tail(300, 120))
    local = write_shards(tmp_path / "set", documents, vocab_size=VOCAB, shard_tokens=300)
    assert len(local.shards) > 12
    system = fsspec.filesystem("memory")
    system.put(str(tmp_path / "set"), "/blocks", recursive=True)
    settings = settings_at("memory://blocks", shuffle=Blocks(window=2), epochs=2, **changes)
    expected = inline(replace(settings, data=str(tmp_path / "set")), 0)
    needed = needed_at_once(settings, Feed(settings).sources, np.array([entry.bytes for entry in local.shards]))
    assert needed < sum(entry.bytes for entry in local.shards) // 2
    feed = Feed(settings, cache=Cache(folder=tmp_path / "cache", limit=needed))
    taken = []
    for _, batch in walk(feed, 0):
        taken.append(batch_digest(batch))
        # While it is looked at, a file may go and another come: the least of some looks is what there was at a time.
        assert min(bytes_in(tmp_path / "cache" / FOLDER) for _ in range(5)) <= needed
        time.sleep(0.01)  # as training would: files that will be needed are fetched meanwhile
    assert taken == expected
    assert feed.shards.arrivals is not None
    assert len(local.shards) <= feed.shards.arrivals.store.counters.fetched <= 2 * len(local.shards)
    feed.shards.close()
    system.rm("/blocks", recursive=True)
