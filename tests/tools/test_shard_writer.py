"""The shard writer: what goes in comes out by plain pyarrow, and nothing half-written looks finished."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import LENGTHS_NAME, MANIFEST_NAME, read_manifest
from seqmesh.loader.shards import ShardSet
from seqmesh.tools.shard_writer import Finished, ShardWriter, write_shards
from seqmesh.tools.verify import verify_set

documents = st.lists(st.lists(st.integers(0, 69_999), min_size=1, max_size=12), max_size=20)


def read_table(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def read_ids(folder: Path) -> list[Any]:
    tables = [read_table(folder / shard.file) for shard in read_manifest(folder).shards]
    return [row for table in tables for row in table.column("input_ids").to_pylist()]


@settings(max_examples=40, deadline=None)
@given(documents=documents, vocab_size=st.sampled_from([70_000, 128_256]), shard_tokens=st.integers(1, 40))
def test_documents_come_back_as_they_went_in(documents: list[list[int]], vocab_size: int, shard_tokens: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        manifest = write_shards(folder, documents, vocab_size=vocab_size, shard_tokens=shard_tokens)
        assert read_ids(folder) == documents
        index = read_table(folder / LENGTHS_NAME)
        assert index.column("length").to_pylist() == [len(document) for document in documents]
        assert index.column("supervised").to_pylist() == [len(document) - 1 for document in documents]
        assert manifest == read_manifest(folder)
        for shard in manifest.shards:
            assert shard.xxh3 == checksum(folder / shard.file)
            assert shard.tokens <= shard_tokens or shard.rows == 1


def test_the_columns_have_the_types_of_the_format(tmp_path: Path) -> None:
    write_shards(tmp_path / "narrow", [[1, 2]], vocab_size=65_536)
    write_shards(tmp_path / "wide", [[1, 2]], vocab_size=65_537)
    for name, width in (("narrow", pa.uint16()), ("wide", pa.uint32())):
        schema = read_table(tmp_path / name / "shard-00000.arrow").schema
        assert schema.field("input_ids").type == pa.large_list(width)
        assert schema.field("doc_id").type == pa.large_string()
        assert schema.field("source").type == pa.uint16()


def test_shards_do_not_depend_on_how_documents_arrive(tmp_path: Path) -> None:
    lengths = [3, 9, 1, 1, 25, 4, 4, 2]
    arrays = [np.arange(length) for length in lengths]
    names = [f"d{index}" for index in range(len(lengths))]
    write_shards(tmp_path / "bulk", arrays, doc_ids=names, shard_tokens=10)
    with ShardWriter(tmp_path / "one", vocab_size=1 << 16, tokenizer="none", eod_id=None, shard_tokens=10) as writer:
        writer.counts["documents_in"] = len(lengths)
        for array, name in zip(arrays, names, strict=True):
            writer.add(array, lengths=[array.size], doc_ids=[name], sources=["all"])
    files = sorted(path.name for path in (tmp_path / "bulk").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "one").iterdir())
    assert [shard.rows for shard in read_manifest(tmp_path / "one").shards] == [1, 2, 1, 1, 3]
    for name in files:
        assert (tmp_path / "bulk" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_a_set_is_continued_after_any_shard(tmp_path: Path, shards: int) -> None:
    lengths = [3, 9, 1, 1, 25, 4, 4, 2]
    arrays = [np.arange(length) for length in lengths]
    sources = ["a", "b", "a", "a", "c", "c", "a", "d"]
    whole = write_shards(tmp_path / "whole", arrays, sources=sources, shard_tokens=10)
    first = sum(shard.rows for shard in whole.shards[:shards])
    rest = tmp_path / "rest"
    rest.mkdir()
    for shard in whole.shards[:shards]:
        (rest / shard.file).write_bytes((tmp_path / "whole" / shard.file).read_bytes())
    names = list(dict.fromkeys(sources[:first]))
    finished = Finished(
        shards=whole.shards[:shards],
        lengths=(np.array(lengths[:first]),),
        codes=(np.array([names.index(source) for source in sources[:first]], np.uint16),),
        sources=tuple(names),
    )
    with ShardWriter(
        rest, vocab_size=1 << 16, tokenizer="none", eod_id=None, shard_tokens=10, finished=finished
    ) as writer:
        writer.counts.update(whole.counts)
        names = [str(number) for number in range(first, len(lengths))]
        flat = np.concatenate([*arrays[first:], np.zeros(0, np.int64)])
        writer.add(flat, lengths=lengths[first:], doc_ids=names, sources=sources[first:])
    assert {path.name: path.read_bytes() for path in rest.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }


def test_a_set_without_documents_has_one_shard_without_rows(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, [])
    assert [(shard.rows, shard.tokens) for shard in manifest.shards] == [(0, 0)]
    assert read_table(tmp_path / "shard-00000.arrow").num_rows == 0
    assert read_table(tmp_path / LENGTHS_NAME).num_rows == 0


def test_sources_are_named_in_order_of_appearance(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, [[1], [2], [3]], sources=["web", "code", "web"], doc_ids=["a", "b", "c"])
    assert manifest.sources == ("web", "code")
    table = read_table(tmp_path / "shard-00000.arrow")
    assert table.column("source").to_pylist() == [0, 1, 0]
    assert table.column("doc_id").to_pylist() == ["a", "b", "c"]


@pytest.mark.parametrize("bad", [100, -1])
def test_an_id_outside_the_vocabulary_is_refused_by_document_and_position(tmp_path: Path, bad: int) -> None:
    with pytest.raises(ValueError, match=rf"'b' \(number 1 of the set\), position 2: token id {bad} is outside"):
        write_shards(tmp_path, [[1, 2], [3, 4, bad], [5]], vocab_size=100, doc_ids=["a", "b", "c"])
    assert not (tmp_path / MANIFEST_NAME).exists()


def test_empty_documents_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="document 'b' is empty"):
        write_shards(tmp_path, [[1], []], doc_ids=["a", "b"])


@pytest.mark.parametrize(
    ("ids", "lengths", "names", "message"),
    [
        ([1.5, 2.5], [2], ["a"], "float64"),
        ([1, 2, 3], [2], ["a"], "add up to 2: there are 3"),
        ([1, 2], [2], ["a", "b"], "1 lengths, 2 doc_ids"),
        ([[1, 2]], [2], ["a"], "2 dimensions"),
    ],
)
def test_calls_that_contradict_themselves_are_refused(
    tmp_path: Path, ids: list[int], lengths: list[int], names: list[str], message: str
) -> None:
    writer = ShardWriter(tmp_path, vocab_size=10, tokenizer="none", eod_id=None)
    with pytest.raises(ValueError, match=message):
        writer.add(ids, lengths=lengths, doc_ids=names, sources=["all"] * len(names))


def test_an_exception_leaves_finished_shards_but_no_manifest(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, vocab_size=10, tokenizer="none", eod_id=None, shard_tokens=2)
    with pytest.raises(RuntimeError), writer:
        writer.add([1, 2, 3, 4], lengths=[2, 2], doc_ids=["a", "b"], sources=["all"] * 2)
        raise RuntimeError("the reader broke")
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.arrow"]


def test_a_finished_set_is_never_written_over(tmp_path: Path) -> None:
    write_shards(tmp_path, [[1]])
    with pytest.raises(FileExistsError, match="already holds a finished shard set"):
        write_shards(tmp_path, [[2]])


def test_a_full_disk_is_reported_by_file_and_leaves_no_partial_one(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*shard-00000\.arrow"):
            write_shards(tmp_path, [np.zeros(1 << 20, np.int64)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"), [({"shard_tokens": 0}, "shard_tokens is 0"), ({"eod_id": 10}, "eod_id is 10")]
)
def test_unfit_settings_are_refused(tmp_path: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_shards(tmp_path, [[1]], vocab_size=10, **arguments)  # type: ignore[arg-type]


def test_spans_come_back_as_they_went_in_and_decide_what_is_supervised(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [1, 2, 3, 4], [5]]
    targets: list[Any] = [None, [(0, 2), (3, 4)], None, np.zeros((0, 2)), np.array([[0, 1]], np.uint8)]
    write_shards(tmp_path / "set", documents, targets=targets, shard_tokens=5)
    tables = [read_table(tmp_path / "set" / shard.file) for shard in read_manifest(tmp_path / "set").shards]
    columns = [table.column("targets").to_pylist() if "targets" in table.schema.names else None for table in tables]
    assert columns == [None, [[0, 2, 3, 4]], None, [[], [0, 1]]]
    assert tables[1].schema.field("targets").type == pa.large_list(pa.int32())
    assert read_table(tmp_path / "set" / LENGTHS_NAME).column("supervised").to_pylist() == [2, 2, 1, 0, 0]


def test_spans_that_are_all_none_leave_no_trace_and_files_do_not_depend_on_the_calls(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4, 5, 6], [7]]
    write_shards(tmp_path / "without", documents)
    write_shards(tmp_path / "none", documents, targets=[None, None, None])
    targets = [None, [(1, 2)], None]
    write_shards(tmp_path / "bulk", documents, targets=targets)
    with ShardWriter(tmp_path / "one", vocab_size=1 << 16, tokenizer="none", eod_id=None) as writer:
        writer.counts["documents_in"] = 3
        for i, spans in enumerate(targets):
            more: dict[str, Any] = {} if spans is None else {"targets": [spans]}
            writer.add(documents[i], lengths=[len(documents[i])], doc_ids=[str(i)], sources=["all"], **more)
    for one, other in (("without", "none"), ("bulk", "one")):
        for path in (tmp_path / one).iterdir():
            assert path.read_bytes() == (tmp_path / other / path.name).read_bytes(), path


def test_a_set_with_spans_is_continued(tmp_path: Path) -> None:
    documents, targets = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[(0, 1)], [(1, 3)], None]
    whole = write_shards(tmp_path / "whole", documents, targets=targets, shard_tokens=6)
    finished = Finished(
        shards=whole.shards[:1],
        lengths=(np.array([3, 3]),),
        codes=(np.zeros(2, np.uint16),),
        supervised=(np.array([0, 2]),),
        sources=("all",),
    )
    with ShardWriter(tmp_path / "rest", vocab_size=1 << 16, tokenizer="none", eod_id=None, finished=finished) as writer:
        writer.add([7, 8, 9], lengths=[3], doc_ids=["2"], sources=["all"])
    for name in ("shard-00001.arrow", LENGTHS_NAME):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "rest" / name).read_bytes()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 1), (1, 5)], "span 1 of its targets is 1 to 5: spans must lie inside its 4 tokens"),
        ([(2, 2)], "span 0 of its targets is 2 to 2"),
        ([(-1, 2)], "span 0 of its targets is -1 to 2"),
        ([(0, 3), (2, 4)], "span 1 of its targets is 2 to 4"),
        ([(0, 1 << 32)], "span 0 of its targets is 0 to 4294967296"),
        ([0, 1], "targets are int64 of shape .2,.: must be pairs"),
        ([(0.0, 1.0)], "targets are float64 of shape .1, 2.: must be pairs of integers"),
    ],
)
def test_bad_spans_are_refused_naming_the_document(tmp_path: Path, spans: list[Any], message: str) -> None:
    writer = ShardWriter(tmp_path, vocab_size=100, tokenizer="none", eod_id=None)
    more = {"doc_ids": ["a", "b"], "sources": ["all", "all"]}
    with pytest.raises(ValueError, match=rf"document 'b' \(number 1 of the set\): {message}"):
        writer.add([1, 2, 3, 4, 5, 6], lengths=[2, 4], targets=[None, spans], **more)
    with pytest.raises(ValueError, match="2 lengths, 1 targets: must be as many"):
        writer.add([1, 2, 3, 4, 5, 6], lengths=[2, 4], targets=[None], **more)
    assert writer.finish().documents == 0


def test_metadata_goes_along_where_there_is_some_and_disturbs_nobody(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "set", vocab_size=10, tokenizer="none", eod_id=None, shard_tokens=3) as writer:
        names: dict[str, Any] = {"doc_ids": ["a", "b", "c"], "sources": ["all"] * 3}
        writer.add([1, 2, 3, 4, 5], lengths=[2, 1, 2], metadata=['{"n":1}', None, None], **names)
        with pytest.raises(ValueError, match="3 lengths, 1 metadata: must be as many"):
            writer.add([1, 2, 3], lengths=[1, 1, 1], metadata=["{}"], **names)
    assert read_table(tmp_path / "set" / "shard-00000.arrow").column("metadata").to_pylist() == ['{"n":1}', None]
    assert "metadata" not in read_table(tmp_path / "set" / "shard-00001.arrow").schema.names
    assert verify_set(tmp_path / "set") == []
    shards = ShardSet(tmp_path / "set")
    assert [shards.tokens(number).tolist() for number in range(len(shards))] == [[1, 2], [3], [4, 5]]
