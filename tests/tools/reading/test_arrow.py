"""Reading Arrow files and saved datasets: every row is a document or has a reason; what is cut short is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from seqmesh.tools.documents import read_records
from seqmesh.tools.inputs import find_files
from seqmesh.tools.reading import rows as rows_module
from seqmesh.tools.records import BadRecord, Columns, Cursor, Document, Record

FORMATS: dict[str, Any] = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}


def write(path: Path, columns: dict[str, Any], *, format: str = "file", rows: int = 2, codec: Any = None) -> Path:
    table = pa.table(columns)
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with FORMATS[format](str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def records(*inputs: str | Path, **options: Any) -> list[Record]:
    return list(read_records(find_files([str(given) for given in inputs]), **options))


def rows(found: Sequence[Record]) -> list[tuple[str, str, str]]:
    return [(record.doc_id, record.text, record.source) for record in found if isinstance(record, Document)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_columns_give_texts_ids_and_sources(tmp_path: Path, format: str, codec: Any) -> None:
    columns = {
        "score": [0.5, 1.0, 2.0],
        "source": pa.array(["web", "code", None]).dictionary_encode(),
        "text": pa.array(["a", "é", "c"], pa.large_string()),
        "id": pa.array([7, None, 9], pa.int32()),
    }
    path = write(tmp_path / "web.v1.arrow", columns, format=format, codec=codec)
    found = records(path)
    assert rows(found) == [("7", "a", "web"), ("web.v1.arrow:1", "é", "code"), ("9", "c", "web")]
    assert [str(record.place) for record in found][2] == f"{path}, row 2 (record batch 1, both counted from 0)"
    assert found[2].place.fields() == {"file": str(path), "row": 2, "record_batch": 1}
    kept = records(path, columns=Columns(keep=("score",)))
    assert [record.metadata for record in kept if isinstance(record, Document)] == [
        '{"score":0.5}', '{"score":1.0}', '{"score":2.0}',
    ]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_files_behind_urls_are_read(tmp_path: Path, format: str) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/part.arrow", write(tmp_path / "a.arrow", {"text": ["A", "B", "C"]}, format=format).read_bytes())
    try:
        assert [text for _, text, _ in rows(records("memory://part.arrow"))] == ["A", "B", "C"]
    finally:
        memory.rm("/part.arrow")


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_cut_anywhere_is_refused_before_or_at_its_end(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "a.arrow", {"text": [f"document {number}" for number in range(40)]}, format=format, rows=10)
    whole = path.read_bytes()
    assert len(records(path)) == 40
    for kept in {*range(0, len(whole), 7), len(whole) - 1, len(whole) - 8}:
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=rf"cannot read {re.escape(str(path))} at row \d+: cut short, dam"):
            records(path)


def test_a_stream_with_something_behind_its_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", {"text": ["a", "b"]}, format="stream")
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match="bytes follow the end mark of its stream"):
        records(path)


@pytest.mark.parametrize("format", FORMATS)
def test_offsets_that_lead_out_of_the_file_are_refused(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "a.arrow", {"text": ["abcdefgh", "ijkl", "m"]}, format=format, rows=3)
    data = path.read_bytes()
    offsets = np.array([0, 8, 12, 13], np.int32).tobytes()
    assert data.count(offsets) == 1
    for bad in ([0, 8, 1 << 30, 13], [0, 8, 12, 1 << 30], [0, -8, 12, 13]):
        path.write_bytes(data.replace(offsets, np.array(bad, np.int32).tobytes()))
        with pytest.raises(ValueError, match=r"cannot read .*a\.arrow at row 0: cut short, damaged"):
            records(path)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_a_string_that_is_not_utf8_does_not_take_its_neighbours_along(tmp_path: Path, kind: pa.DataType) -> None:
    binaries: dict[Any, Any] = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    binary = binaries.get(kind, pa.binary_view())
    path = write(tmp_path / "a.arrow", {"text": pa.array([b"a", b"\xff", b"c"], binary).view(kind)}, rows=3)
    good, bad, last = records(path)
    assert rows([good, last]) == [("a.arrow:0", "a", "a"), ("a.arrow:2", "c", "a")]
    assert isinstance(bad, BadRecord)
    assert bad.reason == "the field text is binary data, not a string"


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", {"content": ["a"], "id": ["x"]})
    with pytest.raises(ValueError, match=rf"{path} has no column 'text' \(its columns: content, id\)"):
        records(path)
    with pytest.raises(ValueError, match=r"Arrow files are not read through \.gz"):
        (tmp_path / "a.arrow.gz").write_bytes(b"")
        records(tmp_path / "a.arrow.gz")


@pytest.mark.parametrize("format", FORMATS)
def test_reading_from_the_beginning_of_any_row_gives_the_rest(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 2)
    texts = [f"text {number}" if number % 4 else None for number in range(17)]
    path = write(tmp_path / "a.arrow", {"text": texts}, format=format, rows=5)
    (tmp_path / "b.jsonl").write_text('{"text": "after"}\n')
    everything = records(path, tmp_path / "b.jsonl")
    assert len(everything) == 18
    for number, record in enumerate(everything):
        rest = records(path, tmp_path / "b.jsonl", start=record.place.cursor)
        assert list(map(shown, rest)) == list(map(shown, everything[number:]))
    assert records(path, start=Cursor(file=0, record=17, offset=0)) == []


def shown(record: Record) -> tuple[Any, ...]:
    content = record.reason if isinstance(record, BadRecord) else (record.doc_id, record.text)
    return str(record.place), record.place.position, content


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"text {number}" for number in range(23)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    datasets.Dataset.from_dict({"text": texts, "chat": chats}).save_to_disk(tmp_path / "notes", num_shards=3)
    found = records(tmp_path / "notes")
    assert [text for _, text, _ in rows(found)] == texts
    assert rows(found)[0] == ("data-00000-of-00003.arrow:0", "text 0", "notes")
    conversations = records(tmp_path / "notes", columns=Columns(chat="chat"))
    assert [record.messages for record in conversations if isinstance(record, Document)] == [
        tuple(chat) for chat in chats
    ]


def test_a_dataset_of_several_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows_of = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": rows_of, "test": rows_of}).save_to_disk(tmp_path / "notes")
    with pytest.raises(
        ValueError, match=r"is a saved dataset of the splits train, test: give the folders .*notes/train"
    ):
        records(tmp_path / "notes")
    assert len(records(tmp_path / "notes" / "test")) == 1
    (tmp_path / "notes" / "other").mkdir()
    (tmp_path / "notes" / "other" / "state.json").write_text("a text")
    named = [name for name, _, _ in rows(records(tmp_path))]
    splits = [f"notes/{split}/data-00000-of-00001.arrow:0" for split in ("test", "train")]
    assert named == ["notes/other/state.json", *splits]


def test_folders_of_other_arrow_files_and_descriptions_that_are_none(tmp_path: Path) -> None:
    for name in ("set-test", "set-train"):
        write(tmp_path / f"{name}.arrow", {"text": [name]}, format="stream")
    assert [text for _, text, _ in rows(records(tmp_path))] == ["set-test", "set-train"]
    (tmp_path / "dataset_info.json").write_text('{"splits": {"train": {}}}')
    assert [text for _, text, _ in rows(records(tmp_path))] == ["set-test", "set-train"]
    (tmp_path / "dataset_info.json").write_text('{"splits": {"train": {}, "test": {}}}')
    with pytest.raises(ValueError, match=r"holds the splits train, test of a dataset side by side: choose files by a"):
        records(tmp_path)
    assert [text for _, text, _ in rows(records(f"{tmp_path}/*-train*.arrow"))] == ["set-train"]
    for state, reason in (
        ("[]", "it is no object"),
        ("{", "Expecting property name"),
        ("{}", "it lists no files"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "which is no file of that folder"),
        ('{"_data_files": [], "_indices_data_files": [1]}', "save it again after flatten_indices"),
    ):
        (tmp_path / "state.json").write_text(state)
        with pytest.raises(ValueError, match=reason):
            records(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(FileNotFoundError, match=r"gone\.arrow"):
        records(tmp_path)
