import ctypes
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seqmesh.loader.chunks import list_addresses
from seqmesh.loader.errors import ShardError
from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import FileEntry, read_manifest
from seqmesh.loader.shards import ShardSet
from seqmesh.packer.lengths import Int64Array
from tests.support import documents_of, make_set, rewrite_shard

LENGTHS = [5, 1, 30, 7, 7, 2, 120, 1, 64]


def read_at(address: int, count: int, dtype: Any) -> list[int]:
    found: list[int] = np.frombuffer(ctypes.string_at(address, count * np.dtype(dtype).itemsize), dtype).tolist()
    return found


@pytest.mark.parametrize("vocab", [1000, 100_000])
def test_documents_are_found_by_address_and_by_number(tmp_path: Path, vocab: int) -> None:
    shards = ShardSet(make_set(tmp_path, LENGTHS, vocab=vocab, shard_tokens=40))
    expected = documents_of(LENGTHS, vocab=vocab)
    assert len(shards.catalog.parts) > 2
    assert shards.lengths.tolist() == LENGTHS
    assert shards.supervised.tolist() == [n - 1 for n in LENGTHS]
    numbers: Int64Array = np.random.default_rng(0).permutation(len(LENGTHS))
    for number, address in zip(numbers.tolist(), shards.places(numbers)[0].tolist(), strict=True):
        assert shards.tokens(number).tolist() == expected[number].tolist()
        assert read_at(address, LENGTHS[number], shards.token_dtype) == expected[number].tolist()
        assert shards.doc_id(number) == str(number)


def test_a_shard_of_several_record_batches_is_read_without_joining_them(tmp_path: Path) -> None:
    make_set(tmp_path, LENGTHS, shard_tokens=10_000)
    whole = pa.ipc.open_file(str(tmp_path / "shard-00000.arrow")).get_batch(0)
    rewrite_shard(tmp_path, "shard-00000.arrow", [whole.slice(0, 4), whole.slice(4, 0), whole.slice(4)])
    shards = ShardSet(tmp_path)
    addresses = shards.places(np.arange(len(LENGTHS)))[0]
    for number, document in enumerate(documents_of(LENGTHS)):
        assert read_at(int(addresses[number]), len(document), "uint16") == document.tolist()


def test_rows_of_a_sliced_column_are_read_through_its_offsets() -> None:
    column = pa.array([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], pa.large_list(pa.uint16())).slice(1, 2)
    offsets, values, size = list_addresses(column)
    starts = read_at(offsets, 3, "int64")
    assert [read_at(values, size, "uint16")[a:b] for a, b in pairwise(starts)] == [[4, 5], [6]]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (make_set(tmp_path, LENGTHS, shard_tokens=40) / "shard-00001.arrow").unlink()
    with pytest.raises(ShardError, match=r"shard-00001.arrow: is missing"):
        ShardSet(tmp_path)


@pytest.mark.parametrize("name", ["shard-00001.arrow", "lengths.arrow"])
def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path, name: str) -> None:
    path = make_set(tmp_path, LENGTHS, shard_tokens=40) / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ShardError, match=rf"{name}: has {size - 8} bytes, the manifest says {size}"):
        ShardSet(tmp_path)


def test_a_file_of_the_right_size_that_is_no_arrow_file_is_named(tmp_path: Path) -> None:
    path = make_set(tmp_path, LENGTHS) / "shard-00000.arrow"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(ShardError, match=r"shard-00000.arrow: is not an Arrow file"):
        ShardSet(tmp_path)


def test_offsets_that_contradict_the_lengths_are_refused_before_memory_is_read(tmp_path: Path) -> None:
    make_set(tmp_path, LENGTHS, shard_tokens=10_000)
    batch = pa.ipc.open_file(str(tmp_path / "shard-00000.arrow")).get_batch(0)
    ids: Any = batch.column("input_ids")
    offsets = np.frombuffer(ids.buffers()[1], np.int64).copy()
    offsets[3] = 10**12  # as a flipped bit would
    values = pa.Array.from_buffers(pa.uint16(), len(ids.values), [None, ids.values.buffers()[1]])
    broken = pa.Array.from_buffers(ids.type, len(ids), [None, pa.py_buffer(offsets.tobytes())], children=[values])
    columns = [broken, batch.column("doc_id"), batch.column("source")]
    rewrite_shard(tmp_path, "shard-00000.arrow", [pa.RecordBatch.from_arrays(columns, schema=batch.schema)])
    shards = ShardSet(tmp_path)
    assert shards.places(np.array([0, 1, 5])).shape == (3, 3)
    with pytest.raises(ShardError, match=r"shard-00000.arrow: the offsets of document 2 contradict"):
        shards.places(np.array([0, 2]))


@pytest.mark.parametrize(
    ("ids_type", "extra", "message"),
    [
        (pa.list_(pa.int32()), {}, r"shard-00000.arrow: input_ids is list<item: int32>"),
        (pa.large_list(pa.uint32()), {}, r"the manifest says large_list<item: uint16>"),
        (
            pa.large_list(pa.uint16()),
            {"targets": pa.list_(pa.int32())},
            "00.arrow: targets is list<.* must be large_list<",
        ),
    ],
)
def test_columns_of_another_type_are_refused(
    tmp_path: Path, ids_type: pa.DataType, extra: dict[str, pa.DataType], message: str
) -> None:
    make_set(tmp_path, [2, 2])
    columns = {"input_ids": pa.array([[1, 2], [3, 4]], ids_type)}
    columns |= {name: pa.array([[0, 1], [0, 1]], kind) for name, kind in extra.items()}
    rewrite_shard(tmp_path, "shard-00000.arrow", [pa.RecordBatch.from_pydict(columns)])
    with pytest.raises(ShardError, match=message):
        ShardSet(tmp_path)


def test_a_lengths_index_that_disagrees_is_refused(tmp_path: Path) -> None:
    folder = make_set(tmp_path, [2, 2])
    other = make_set(tmp_path / "other", [2, 3])
    (folder / "lengths.arrow").write_bytes((other / "lengths.arrow").read_bytes())
    with pytest.raises(ShardError, match=r"lengths.arrow: does not hold the rows and tokens"):
        ShardSet(folder)


def test_a_set_without_documents_opens(tmp_path: Path) -> None:
    assert len(ShardSet(make_set(tmp_path, []))) == 0


def test_checksums_in_the_manifest_are_those_of_the_files(tmp_path: Path) -> None:
    manifest = read_manifest(make_set(tmp_path, LENGTHS, shard_tokens=40))
    entries: list[FileEntry] = [*manifest.shards, manifest.lengths]
    assert all(checksum(tmp_path / entry.file) == entry.xxh3 for entry in entries)
