"""Files of one set with other types of lists: read each by its own, or refused with file and type. Never joined."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from seqmesh.loader.catalog import Reading
from seqmesh.loader.errors import ShardError
from seqmesh.loader.feed import Feed
from seqmesh.loader.shards import ShardSet
from tests.formats import table_of, write_arrow
from tests.support import documents_of, make_set, rewrite_shard, settings_for, walk

DOCUMENTS = documents_of([5, 60, 1, 33, 20, 8])
KINDS = [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64())]


def test_such_columns_do_not_join() -> None:
    with pytest.raises(pa.ArrowInvalid):
        pa.concat_tables([table_of(DOCUMENTS, kind) for kind in KINDS])


def test_each_file_is_read_by_its_own_type(tmp_path: Path) -> None:
    names = []
    for number, kind in enumerate(KINDS):
        part = table_of(DOCUMENTS[2 * number : 2 * number + 2], kind)
        made = write_arrow(tmp_path / f"part{number}", part, files=1)
        (made / "data-00000-of-00001.arrow").rename(tmp_path / f"{number}.arrow")
        names.append(f"{number}.arrow")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    shards = ShardSet(tmp_path, reading=Reading(vocab_size=1000))
    assert [shards.tokens(n).tolist() for n in range(6)] == [each.tolist() for each in DOCUMENTS]
    served = {
        document: batch.input_ids[first:last].tolist()
        for _, batch in walk(Feed(settings_for(tmp_path, vocab_size=1000)), 0)
        for document, first, last in zip(
            batch.document_ids.tolist(), batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False
        )
    }
    assert served == {n: each.tolist() for n, each in enumerate(DOCUMENTS)}


def test_a_shard_of_another_type_than_the_manifest_s_is_refused_by_name(tmp_path: Path) -> None:
    make_set(tmp_path, [100, 100, 100])
    other = pa.RecordBatch.from_pydict({"input_ids": pa.array([[1] * 100], pa.list_(pa.int32()))})
    rewrite_shard(tmp_path, "shard-00001.arrow", [other])
    with pytest.raises(ShardError, match=r"shard-00001.arrow: input_ids is list<item: int32>: the manifest says large"):
        ShardSet(tmp_path)
