"""Reading Parquet: every row is a document or has a reason, in bounded memory, from any row on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqmesh.loader.manifest import read_manifest
from seqmesh.tools.documents import read_records
from seqmesh.tools.inputs import find_files
from seqmesh.tools.prepare import PrepareOptions, run
from seqmesh.tools.reading import rows as rows_module
from seqmesh.tools.records import BadRecord, Columns, Cursor, Document, Record


def write(path: Path, columns: dict[str, Any], *, row_group: int = 1 << 20) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group)
    return path


def records(*inputs: str | Path, **options: Any) -> list[Record]:
    return list(read_records(find_files([str(given) for given in inputs]), **options))


def rows(*inputs: str | Path, **options: Any) -> list[tuple[str, str, str]]:
    return [
        (record.doc_id, record.text, record.source)
        for record in records(*inputs, **options)
        if isinstance(record, Document)
    ]


def test_columns_give_texts_ids_and_sources(tmp_path: Path) -> None:
    columns = {
        "text": ["a", "é", "c"],
        "id": pa.array([7, None, 9], pa.int32()),
        "source": pa.array(["web", "code", None]).dictionary_encode(),
        "score": [0.5, 1.0, 2.0],
    }
    path = write(tmp_path / "web.v1.parquet", columns, row_group=2)
    assert rows(path) == [("7", "a", "web"), ("web.v1.parquet:1", "é", "code"), ("9", "c", "web")]
    assert [record.size for record in records(path)] == [1, 2, 1]
    assert records(path)[-1].place.position == path.stat().st_size


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_type_of_string_is_text(tmp_path: Path, kind: pa.DataType) -> None:
    path = write(tmp_path / "a.parquet", {"text": pa.array(["a", "bc"]).cast(kind)})
    assert [text for _, text, _ in rows(path)] == ["a", "bc"]


def test_parquet_files_in_folders_and_behind_urls_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    write(folder / "b.parquet", {"text": ["B"]})
    (folder / "a.txt").write_text("A")
    assert rows(folder) == [("a.txt", "A", "notes"), ("b.parquet:0", "B", "notes")]
    memory = fsspec.filesystem("memory")
    memory.pipe("/part.parquet", (folder / "b.parquet").read_bytes())
    try:
        assert rows("memory://part.parquet") == [("part.parquet:0", "B", "part")]
    finally:
        memory.rm("/part.parquet")


def test_a_row_without_text_is_a_bad_record_with_row_and_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a", "b", None, "d"], "id": ["w", "x", "y", "z"]}, row_group=2)
    bad = records(path)[2]
    assert isinstance(bad, BadRecord)
    assert bad.sentence() == f"{path}, row 2 (row group 1, both counted from 0): the field text is null, not a string"
    entry = json.loads(bad.as_json())
    assert (entry["file"], entry["row"], entry["row_group"], entry["reason"]) == (str(path), 2, 1, bad.reason)
    assert "'id': 'y'" in entry["raw"]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([5]), "the field text is a number, not a string"),
        (pa.array([b"a"]), "the field text is binary data, not a string"),
        (pa.array([["a"]]), "the field text is a list, not a string"),
        (pa.array([{"a": 1}]), "the field text is an object, not a string"),
        (pa.array([b"\xff"]).view(pa.string()), "the field text is binary data, not a string"),
        (pa.nulls(1), "the field text is null, not a string"),
    ],
)
def test_what_is_not_a_string_is_no_text(tmp_path: Path, column: Any, reason: str) -> None:
    (bad,) = records(write(tmp_path / "a.parquet", {"text": column}))
    assert isinstance(bad, BadRecord)
    assert bad.reason == reason


def test_a_string_that_is_not_utf8_does_not_take_its_neighbours_along(tmp_path: Path) -> None:
    column = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    assert [text for _, text, _ in rows(write(tmp_path / "a.parquet", {"text": column}))] == ["a", "c"]


def test_another_column_may_hold_the_text_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"content": ["a"], "id": ["x"]})
    assert rows(path, columns=Columns(text="content")) == [("x", "a", "a")]
    assert rows(path, columns=Columns(text="id")) == [("x", "x", "a")]
    with pytest.raises(ValueError, match=rf"{path} has no column 'text' \(its columns: content, id\)"):
        records(path)


def test_reading_from_the_beginning_of_any_row_gives_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 2)
    texts = [f"text {number}" if number % 4 else None for number in range(17)]
    path = write(tmp_path / "a.parquet", {"text": texts}, row_group=5)
    (tmp_path / "b.jsonl").write_text('{"text": "after"}\n')
    files = find_files([str(path), str(tmp_path / "b.jsonl")])
    everything = list(read_records(files))
    assert len(everything) == 18
    for number, record in enumerate(everything):
        rest = read_records(files, start=record.place.cursor)
        assert list(map(shown, rest)) == list(map(shown, everything[number:]))


def shown(record: Record) -> tuple[Any, ...]:
    content = record.reason if isinstance(record, BadRecord) else (record.doc_id, record.text)
    return str(record.place), record.place.position, content


@pytest.fixture
def batches_asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Size of the batches and row groups of every request to the library."""
    asked: list[tuple[int, list[int]]] = []
    original = pq.ParquetFile.iter_batches

    def spied(self: pq.ParquetFile, batch_size: int, *, row_groups: list[int], **options: Any) -> Any:
        asked.append((batch_size, row_groups))
        return original(self, batch_size, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spied)
    return asked


def test_a_batch_is_small_where_rows_are_large(
    tmp_path: Path, batches_asked: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", {"text": [str(number) * 10_000 for number in range(50)]})
    monkeypatch.setattr(rows_module, "BATCH_BYTES", 100_000)
    group = pq.ParquetFile(path).metadata.row_group(0)
    assert len(rows(path)) == 50
    assert batches_asked == [(100_000 // (group.total_byte_size // 50), [0])]


def test_row_groups_before_the_place_to_begin_at_are_not_read(
    tmp_path: Path, batches_asked: list[tuple[int, list[int]]]
) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a"] * 10}, row_group=3)
    assert len(records(path, start=Cursor(file=0, record=6, offset=0))) == 4
    assert [groups for _, groups in batches_asked] == [[2], [3]]


@pytest.mark.parametrize("kept", [0, 10, 2000, -1])
def test_a_cut_file_is_named(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "a.parquet", {"text": [f"document {number}" for number in range(500)]})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"cannot read {re.escape(str(path))} at row 0: cut short, damaged, or no"):
        records(path)


def test_damage_inside_a_file_is_named_with_the_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"document {number}" for number in range(4000)]})
    # Without compression nothing but the checksum tells.
    options: dict[str, Any] = {"write_page_checksum": True, "use_dictionary": False, "compression": "none"}
    pq.write_table(table, path, row_group_size=1000, **options)
    data = bytearray(path.read_bytes())
    third = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data[third.data_page_offset + third.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"cannot read {re.escape(str(path))} at row 2000: cut short, damaged"):
        records(path)


def test_parquet_and_jsonl_of_the_same_documents_give_the_same_shards(
    tmp_path: Path, texts: list[str], tokenizer_path: Path
) -> None:
    names = [f"d{number}" for number in range(len(texts))]
    write(tmp_path / "in.parquet", {"text": texts, "id": names}, row_group=7)
    lines = (json.dumps({"text": text, "id": name}) + "\n" for text, name in zip(texts, names, strict=True))
    (tmp_path / "in.jsonl").write_text("".join(lines))
    for kind in ("parquet", "jsonl"):
        run(PrepareOptions(inputs=(str(tmp_path / f"in.{kind}"),), out=tmp_path / kind, tokenizer=str(tokenizer_path)))
    assert read_manifest(tmp_path / "parquet") == read_manifest(tmp_path / "jsonl")


def test_a_start_past_the_last_row_gives_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a", "b"]})
    assert records(path, start=Cursor(file=0, record=2, offset=0)) == []
