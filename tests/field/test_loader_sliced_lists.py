"""A sliced column of lists: its values are those of all rows, flattening drops what its offsets do not, and a null row
may have bytes behind it. Rows are read through their offsets."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seqmesh.loader.catalog import Reading
from seqmesh.loader.chunks import chunk_of
from seqmesh.loader.errors import ShardError
from seqmesh.loader.shards import ShardSet
from tests.formats import write_arrow
from tests.support import make_set, rewrite_shard

ROWS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
KINDS = [pa.list_(pa.int32()), pa.large_list(pa.uint16())]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_slice_in_memory(kind: pa.DataType) -> None:
    column: Any = pa.array(ROWS, kind).slice(1, 2)
    assert len(column.values) == 10 and column.flatten().to_pylist() == [4, 5, 6]  # the trap
    chunk = chunk_of(pa.record_batch([column], names=["input_ids"]), "input_ids", "file")
    assert chunk.offsets.tolist() == [3, 5, 6]
    assert [chunk.ids[a:b].tolist() for a, b in zip(chunk.offsets, chunk.offsets[1:], strict=False)] == ROWS[1:3]


def test_slices_of_files(tmp_path: Path) -> None:
    ids = pa.table({"input_ids": pa.array(ROWS, pa.list_(pa.int32()))})
    saved = ShardSet(write_arrow(tmp_path / "arrow", ids.slice(1, 2), files=1), reading=Reading(vocab_size=100))
    assert [saved.tokens(n).tolist() for n in range(2)] == ROWS[1:3]
    make_set(tmp_path / "shards", [2, 1])
    whole = pa.ipc.open_file(str(tmp_path / "shards" / "shard-00000.arrow")).get_batch(0)
    long = pa.array(ROWS, pa.large_list(pa.uint16())).slice(1, 2)
    columns = [long, whole.column("doc_id"), whole.column("source")]
    batch = pa.RecordBatch.from_arrays(columns, names=whole.schema.names)
    rewrite_shard(tmp_path / "shards", "shard-00000.arrow", [batch])
    shards = ShardSet(tmp_path / "shards")
    assert [shards.tokens(n).tolist() for n in range(2)] == ROWS[1:3]
    assert shards.places(np.array([1, 0])).shape == (3, 2)


def test_a_null_row_with_bytes_behind_it_is_refused() -> None:
    values, offsets = pa.array([1, 2, 3, 4], pa.uint16()), pa.array([0, 2, 3, 4], pa.int64())
    column = pa.LargeListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))
    assert column.flatten().to_pylist() == [1, 2, 4]  # the trap: the offsets still have the third
    with pytest.raises(ShardError, match="shard-7: input_ids has nulls: every document must be a list"):
        chunk_of(pa.record_batch([column], names=["input_ids"]), "input_ids", "shard-7")
