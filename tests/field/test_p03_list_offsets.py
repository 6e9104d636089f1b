"""32-bit list offsets overflow when chunks are joined: chunks are never joined, and counted with 64 bits.

Two documents of 2**30 + 8 ids, each a record batch of its own with 32-bit offsets. The file is sparse: its ids take no
room on the disk.
"""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seqmesh.loader.catalog import Reading
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.shards import ShardSet
from seqmesh.loader.state import SourceState
from tests.support import settings_for, walk

IDS = 2**30 + 8
END = list(range(1, 9))


class Sparse(io.RawIOBase):
    """Leaves holes where large blocks are written, which are zeros up to their last page."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        hole = max(len(data) - 4096, 0)
        self._file.seek(hole, io.SEEK_CUR)
        self._file.write(memoryview(data)[hole:])
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def document(end: list[int]) -> pa.RecordBatch:
    """Zeros, and these ids at the end."""
    ids = np.zeros(IDS, np.uint8)
    ids[-len(end) :] = end
    lists = pa.ListArray.from_arrays(pa.array([0, IDS], pa.int32()), pa.array(ids))
    return pa.record_batch([lists], names=["input_ids"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    schema = document([0]).schema
    with Sparse(folder / "data.arrow") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(document([7] * 8))
        writer.write_batch(document(END))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder


def test_joining_such_chunks_is_what_overflows() -> None:
    lists = pa.ListArray.from_arrays(pa.array([0, IDS], pa.int32()), pa.nulls(IDS))
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        pa.chunked_array([lists, lists]).combine_chunks()


def test_both_documents_are_counted_and_the_second_is_served(folder: Path) -> None:
    shards = ShardSet(folder, reading=Reading(vocab_size=256))
    assert shards.lengths.tolist() == [IDS, IDS]
    assert int(shards.lengths.sum()) == 2_147_483_664
    assert shards.catalog.parts[0].tokens == 2_147_483_664
    assert len(shards.tokens(1)) == IDS
    assert np.diff(shards.places(np.array([0, 1]))[0]).item() >= IDS


def test_the_end_of_the_second_document_reaches_a_rank(folder: Path) -> None:
    half = dict.fromkeys(("max_document", "capacity", "tokens_per_step"), 1 << 29)
    settings = settings_for(folder, vocab_size=256, overlong="split", shuffle=False, fields=(), **half)
    feed = Feed(settings)
    place = replace(feed.start, sources=(SourceState(position=1, offset=1 << 30),))
    ((_, batch),) = walk(feed, 0, Position(place))
    assert (batch.document_ids.tolist(), batch.document_offsets.tolist()) == ([1], [1 << 30])
    assert batch.input_ids.tolist() == END
