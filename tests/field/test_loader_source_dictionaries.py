"""Source names stored as a dictionary: the codes mean something else in each chunk, and are unified before any is
compared."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqmesh.loader.catalog import Reading
from seqmesh.loader.errors import ShardError
from seqmesh.loader.shards import ShardSet
from tests.formats import write_arrow
from tests.support import forget_sources, make_set, rewrite_shard

CHUNKS = [["web", "code"], ["code", "code", "web"], ["notes", "web"]]
NAMES = [name for chunk in CHUNKS for name in chunk]


def batches() -> list[pa.RecordBatch]:
    return [
        pa.record_batch([[[1, 2]] * len(chunk), pa.array(chunk).dictionary_encode()], names=["input_ids", "source"])
        for chunk in CHUNKS
    ]


def names_of(folder: Path) -> list[str]:
    shards = ShardSet(folder, reading=Reading(vocab_size=10))
    assert sorted(shards.sources) == ["code", "notes", "web"]
    return [shards.sources[code] for code in shards.source_codes()]


def test_the_codes_of_the_chunks_differ() -> None:
    columns: list[Any] = [batch.column("source") for batch in batches()]
    assert [column.indices.to_pylist() for column in columns] == [[0, 1], [0, 0, 1], [0, 1]]


def test_streams_whose_dictionary_is_replaced(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "arrow", pa.Table.from_batches(batches()[:1]), files=1)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), batches()[0].schema) as writer:
        for batch in batches():
            writer.write_batch(batch)
    assert names_of(folder) == NAMES


def test_row_groups_with_dictionaries_of_their_own(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", batches()[0].schema) as writer:
        for batch in batches():
            writer.write_batch(batch)
    assert names_of(tmp_path) == NAMES


def test_a_file_of_arrow_does_not_take_another_dictionary(tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, batches()[0].schema) as writer:
        writer.write_batch(batches()[0])
        with pytest.raises(pa.ArrowInvalid, match="Dictionary replacement"):
            writer.write_batch(batches()[1])


def test_shards_of_ours_have_codes_of_the_manifest_and_nothing_else(tmp_path: Path) -> None:
    forget_sources(make_set(tmp_path, [2, 2], sources=["web", "code"]))
    whole: Any = pa.ipc.open_file(str(tmp_path / "shard-00000.arrow")).get_batch(0)
    encoded = whole.set_column(2, "source", pa.array(["web", "code"]).dictionary_encode())
    rewrite_shard(tmp_path, "shard-00000.arrow", [encoded])
    with pytest.raises(ShardError, match=r"shard-00000.arrow: source is dictionary<.*: must be uint16"):
        ShardSet(tmp_path).source_codes()
