"""Reading documents: every record is a document or has a reason, and says where it stands."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from seqmesh.tools.documents import BOM, read_records
from seqmesh.tools.inputs import find_files
from seqmesh.tools.records import BadRecord, Columns, Cursor, Document, Record


def documents(*inputs: str | Path) -> list[Document]:
    records = list(read_records(find_files([str(given) for given in inputs])))
    bad = [record.sentence() for record in records if isinstance(record, BadRecord)]
    assert not bad
    return [record for record in records if isinstance(record, Document)]


def only_bad(path: Path) -> BadRecord:
    (record,) = read_records(find_files([str(path)]))
    assert isinstance(record, BadRecord)
    return record


def jsonl(*objects: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in objects)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def test_jsonl_gives_texts_ids_and_sources(tmp_path: Path) -> None:
    path = tmp_path / "web.v1.jsonl"
    path.write_bytes(jsonl({"text": "a"}, {"text": "é", "id": 7}, {"text": "c", "id": "x", "source": "code", "n": [1]}))
    found = documents(path)
    assert [document.doc_id for document in found] == ["web.v1.jsonl:1", "7", "x"]
    assert [document.source for document in found] == ["web", "web", "code"]
    assert [document.size for document in found] == [1, 2, 1]


def test_byte_order_marks_windows_line_ends_and_blank_lines_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b\\r\\n\\u0000"}')
    assert [(document.doc_id, document.text) for document in documents(path)] == [
        ("in.jsonl:1", "a"),
        ("in.jsonl:4", "b\r\n\0"),
    ]


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", lambda data: pa.compress(data, codec="zstd", asbytes=True)),
    ],
)
def test_compressed_files_are_read_and_cut_ones_refused(tmp_path: Path, suffix: str, compress: object) -> None:
    assert callable(compress)
    data = compress(jsonl(*({"text": f"document {index}"} for index in range(500))))
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(data)
    found = documents(path)
    assert len(found) == 500
    assert found[0].source == "in"
    assert found[-1].place.position == len(data)
    path.write_bytes(data[: len(data) - 20])
    with pytest.raises(ValueError, match=rf"cannot read .*{suffix} after line \d+"):
        documents(path)


def test_a_folder_holds_one_document_a_file_in_sorted_order(tmp_path: Path) -> None:
    for name, text in (("b.txt", "B"), ("a/z.md", "Z"), ("a/c.txt", "C"), (".git/config", "no"), ("a/.hidden", "no")):
        (tmp_path / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / name).write_text(text)
    (tmp_path / "notes" / "more.jsonl").write_bytes(jsonl({"text": "J"}))
    found = documents(tmp_path / "notes")
    assert [document.doc_id for document in found] == ["a/c.txt", "a/z.md", "b.txt", "more.jsonl:1"]
    assert [document.text for document in found] == ["C", "Z", "B", "J"]
    assert {document.source for document in found} == {"notes"}


def test_urls_are_opened_by_their_driver(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/set/part.jsonl.gz", gzip.compress(jsonl({"text": "from memory"})))
    memory.pipe("/books/one/a.txt", b"a book")
    found = documents("memory://set/part.jsonl.gz", "memory://books")
    assert [(document.doc_id, document.text, document.source) for document in found] == [
        ("part.jsonl.gz:1", "from memory", "part"),
        ("one/a.txt", "a book", "books"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"}{"text": "b"}\n', "more than one JSON value on the line (the second begins at character 13)"),
        (b'{"text": "\xff"}\n', "invalid UTF-8 at byte 10"),
        (b'{"text": 5}\n', "the field text is a number, not a string"),
        (b'{"text": null}\n', "the field text is null"),
        (b'{"words": "a"}\n', "no field text"),
        (b'["text"]\n', "the line is a list, not an object"),
        (b'{"text": "a", "id": 1.5}\n', "the field id is a number"),
        (b'{"text": "a", "id": true}\n', "the field id is a boolean"),
        (b'{"text": "a", "source": 3}\n', "the field source is a number"),
        (b'{"text": "cut he', "the file's last line seems cut off"),
        (b'{"text": "a\x00"}\n', "not JSON: Invalid control character"),
        (b'{"text": "\\ud800"}\n', "the field text holds a lone surrogate"),
        (b'{"text": "a", "id": "\\udfff"}\n', "the field id holds a lone surrogate"),
        (b"[" * 200_000 + b"\n", "beyond the parser's limits"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n", "beyond the parser's limits"),
    ],
)
def test_bad_lines_say_where_and_why(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n" + line)
    bad = only_bad(path)
    assert (bad.place.number, bad.place.offset, bad.size) == (2, 1, len(line))
    assert reason in bad.reason
    assert f"{path}, line 2 (byte offset 1)" in bad.sentence()
    assert json.loads(bad.as_json())["reason"] == bad.reason


def test_a_file_in_a_folder_that_is_not_utf8_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert "invalid UTF-8 at byte 0" in only_bad(tmp_path).reason


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_reading_from_the_beginning_of_any_record_gives_the_rest(tmp_path: Path, suffix: str) -> None:
    packers: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    }
    pack = packers[suffix]
    lines = (
        BOM
        + jsonl({"text": "one"})
        + b"\n \r\nnot json\n"
        + jsonl({"text": "zwölf"}, {"text": ""})
        + b'{"text": "end"}'
    )
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(lines))
    (tmp_path / "folder").mkdir()
    for name in ("1.txt", "2.txt"):
        (tmp_path / "folder" / name).write_text(name)
    (tmp_path / "folder" / f"b.jsonl{suffix}").write_bytes(pack(lines))
    files = find_files([str(tmp_path / f"a.jsonl{suffix}"), str(tmp_path / "folder")])
    records = list(read_records(files))
    assert len(records) == 12
    for number, record in enumerate(records):
        assert [shown(rest) for rest in read_records(files, start=record.place.cursor)] == [
            shown(rest) for rest in records[number:]
        ]


def shown(record: Record) -> tuple[str, ...]:
    """A record without the file's progress, which compressed files report a buffer at a time."""
    if isinstance(record, BadRecord):
        return (record.sentence(), record.as_json())
    return (record.doc_id, record.text, record.source, str(record.place))


def test_a_compressed_file_that_ends_before_the_place_to_begin_at_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl({"text": "one"})))
    with pytest.raises(ValueError, match=r"cannot read .*a\.jsonl\.gz after line 7: the file ends 84 bytes before"):
        list(read_records(find_files([str(path)]), start=Cursor(file=0, record=7, offset=100)))


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"content": "a", "text": "b"}, {"text": "c"}))
    good, bad = read_records(find_files([str(tmp_path / "a.jsonl")]), columns=Columns(text="content"))
    assert isinstance(good, Document)
    assert good.text == "a"
    assert isinstance(bad, BadRecord)
    assert bad.reason == "no field content"


def test_a_file_that_is_written_again_is_told_by_its_version(tmp_path: Path, memory: fsspec.AbstractFileSystem) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl({"text": "a"}))
    (before,) = find_files([str(path)])
    os.utime(path, ns=(0, 1_000_000_001))
    (after,) = find_files([str(path)])
    assert (before.size, before.version) != (after.size, after.version) == (before.size, "1000000001")
    memory.pipe("/a.jsonl", b"")
    (remote,) = find_files(["memory://a.jsonl"])
    assert remote.version == ""


def test_inputs_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such input: .*absent\.jsonl"):
        find_files([str(tmp_path / "absent.jsonl")])
    with pytest.raises(ValueError, match="holds no files to read"):
        find_files([str(tmp_path)])
    with pytest.raises(ValueError, match="cannot open nowhere://x"):
        find_files(["nowhere://x"])
    (tmp_path / "set.zip").write_bytes(b"PK")
    (tmp_path / "a.parquet.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.parquet\.gz: Parquet files are not read through \.gz"):
        find_files([str(tmp_path / "a.parquet.gz")])
    with pytest.raises(ValueError, match=r"set\.zip: files that end in \.zip are not read"):
        find_files([str(tmp_path / "set.zip")])
