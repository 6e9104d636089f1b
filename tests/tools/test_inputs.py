"""Inputs by pattern, by URL and from standard input: the files that are meant, in one order, or a sentence."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqmesh.tools.documents import read_records
from seqmesh.tools.inputs import InputFile, find_files
from seqmesh.tools.reading.stdin import spooled
from seqmesh.tools.records import BadRecord, Columns, Cursor, Document
from tests.storage import http_server


def jsonl(*objects: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in objects)


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        packed = gzip.compress if name.endswith(".gz") else bytes
        (folder / name).write_bytes(packed(jsonl({"text": name})))


def names_of(*inputs: str) -> list[tuple[str, str]]:
    return [(file.name, file.source) for file in find_files(inputs)]


def documents(files: tuple[InputFile, ...], columns: Columns | None = None) -> list[Document]:
    records = list(read_records(files, columns=columns or Columns()))
    assert not [record.sentence() for record in records if isinstance(record, BadRecord)]
    return [record for record in records if isinstance(record, Document)]


def test_a_pattern_stands_for_the_files_that_match_it_in_sorted_order(tmp_path: Path) -> None:
    put(
        tmp_path,
        "b.jsonl",
        "a.v1.jsonl",
        "c.jsonl.gz",
        "deep/d.jsonl",
        "deep/er/e.jsonl",
        ".hidden.jsonl",
        ".git/f.jsonl",
    )
    (tmp_path / "folder.jsonl").mkdir()
    assert names_of(f"{tmp_path}/*.jsonl") == [("a.v1.jsonl", "a"), ("b.jsonl", "b")]
    assert [name for name, _ in names_of(f"{tmp_path}/**/*.jsonl*")] == [
        "a.v1.jsonl", "b.jsonl", "c.jsonl.gz", "deep/d.jsonl", "deep/er/e.jsonl",
    ]  # fmt: skip
    assert names_of(f"{tmp_path}/d*p/[de].jsonl") == [("deep/d.jsonl", "d")]
    shown = [file.shown for file in find_files([f"{tmp_path}/deep/*"])]
    assert shown == [f"{tmp_path}/deep/d.jsonl"]
    assert [document.text for document in documents(find_files([f"{tmp_path}/?.jsonl*"]))] == ["b.jsonl", "c.jsonl.gz"]


def test_a_pattern_names_the_same_documents_as_the_shell_does(tmp_path: Path) -> None:
    put(tmp_path, "b.jsonl", "a.jsonl")
    by_shell = find_files([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert find_files([f"{tmp_path}/*.jsonl"]) == by_shell


def test_a_pattern_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "in/b.jsonl")
    monkeypatch.chdir(tmp_path)
    (file,) = find_files(["in/*.jsonl"])
    assert (file.shown, file.name) == ("in/b.jsonl", "b.jsonl")


def test_a_name_with_a_bracket_in_it_is_a_name_first(tmp_path: Path) -> None:
    put(tmp_path, "data[1].jsonl", "data1.jsonl")
    assert names_of(f"{tmp_path}/data[1].jsonl") == [("data[1].jsonl", "data[1]")]


@pytest.mark.parametrize("pattern", ["*.parquet", "deep/*", "none/**/x?.jsonl"])
def test_a_pattern_that_matches_no_file_is_refused(tmp_path: Path, pattern: str) -> None:
    put(tmp_path, "b.jsonl", "deep/er/x.jsonl")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        find_files([f"{tmp_path}/{pattern}"])


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def test_patterns_of_urls(memory: fsspec.AbstractFileSystem) -> None:
    for name in ("b", "a/c"):
        memory.pipe(f"/set/{name}.jsonl", jsonl({"text": name}))
    assert [file.name for file in find_files(["memory://set/**/*.jsonl"])] == ["a/c.jsonl", "b.jsonl"]
    assert [document.text for document in documents(find_files(["memory://set/*.jsonl"]))] == ["b"]


def test_files_on_the_web_are_read_with_their_queries_and_from_anywhere(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", "b.jsonl.gz")
    pq.write_table(pa.table({"text": ["row 0", "row 1"]}), tmp_path / "c.parquet")
    with http_server(tmp_path, lists=False) as port:
        given = [
            f"http://127.0.0.1:{port}/{name}" for name in ("a.jsonl?download=1", "b.jsonl.gz?x=a/b.c", "c.parquet")
        ]
        files = find_files(given)
        assert [(file.name, file.source) for file in files] == [
            ("a.jsonl", "a"),
            ("b.jsonl.gz", "b"),
            ("c.parquet", "c"),
        ]
        assert all(file.size and file.version for file in files)
        assert [document.text for document in documents(files)] == ["a.jsonl", "b.jsonl.gz", "row 0", "row 1"]
        (rest,) = read_records(files, start=Cursor(file=2, record=1, offset=0))
        assert isinstance(rest, Document)
        assert (rest.text, rest.place.reading.file.shown) == ("row 1", given[2])
        with pytest.raises(FileNotFoundError, match="no such input"):
            find_files([f"http://127.0.0.1:{port}/absent.jsonl"])


class Whole(SimpleHTTPRequestHandler):
    """Serves whole files, without a word on their size."""

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(Path(self.translate_path(self.path)).read_bytes())

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_that_gives_whole_files_only_will_do_for_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(*({"text": str(number)} for number in range(5000))))
    pq.write_table(pa.table({"text": ["c"]}), tmp_path / "t.parquet")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Whole, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        lines, table = find_files(
            [f"http://127.0.0.1:{server.server_port}/{name}" for name in ("a.jsonl", "t.parquet")]
        )
        found = documents((lines,))
        rest = list(read_records([lines], start=found[4000].place.cursor))
        with pytest.raises(ValueError, match=r"cannot read http://.*t\.parquet at row 0"):
            list(read_records([table]))
        server.shutdown()
    assert (len(found), len(rest)) == (5000, 1000)


def test_standard_input_is_a_file_that_can_be_read_from_anywhere_and_by_others(tmp_path: Path) -> None:
    data = jsonl({"text": "one"}, {"text": "two", "id": 7})
    with spooled(io.BytesIO(data), tmp_path / "new") as stdin:
        assert not list((tmp_path / "new").iterdir())
        files = find_files(["-"], stdin=stdin)
        one, two = documents(files)
        assert [(one.doc_id, one.source), (two.doc_id, two.source)] == [("stdin:1", "stdin"), ("7", "stdin")]
        assert str(one.place) == "standard input, line 1 (byte offset 0)"
        assert next(read_records(files, start=two.place.cursor)).place.record == 1
        script = "import sys; sys.stdout.write(open(sys.argv[1]).read())"
        other = subprocess.run([sys.executable, "-c", script, stdin.path], capture_output=True, check=True)
        assert other.stdout == data
        with spooled(io.BytesIO(data), tmp_path) as again, spooled(io.BytesIO(data + b"\n"), tmp_path) as longer:
            assert again.version == stdin.version != longer.version


def test_standard_input_is_given_once_and_where_it_is_read() -> None:
    with pytest.raises(ValueError, match="- is given more than once"):
        find_files(["-", "a", "-"])
    with pytest.raises(ValueError, match="- is standard input, which is not read here"):
        find_files(["-"])


def test_fields_by_name_and_fields_that_are_kept(tmp_path: Path) -> None:
    rows = [
        {"body": "a", "url": "u/1", "lang": "en", "score": 0.5, "stars": 3, "ok": True, "text": 1},
        {"body": "b", "url": 2, "lang": "de", "score": None},
    ]
    (tmp_path / "in.jsonl").write_bytes(jsonl(*rows))
    pq.write_table(
        pa.table({"body": ["c"], "url": ["u/3"], "lang": ["fr"], "score": [1.0], "stars": [None]}),
        tmp_path / "t.parquet",
    )
    columns = Columns(text="body", id="url", source="lang", keep=("score", "stars", "ok"))
    found = documents(find_files([str(tmp_path / "in.jsonl"), str(tmp_path / "t.parquet")]), columns)
    assert [(document.text, document.doc_id, document.source) for document in found] == [
        ("a", "u/1", "en"), ("b", "2", "de"), ("c", "u/3", "fr"),
    ]  # fmt: skip
    assert [document.metadata for document in found] == ['{"score":0.5,"stars":3,"ok":true}', "{}", '{"score":1.0}']


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"body": "a", "lang": "en"}, "no field url"),
        ({"body": "a", "url": "u"}, "no field lang"),
        ({"text": "a", "url": "u", "lang": "en"}, "no field body"),
        ({"body": "a", "url": "u", "lang": "en", "n": [1]}, "the field n is a list: strings, numbers and booleans"),
        (
            {"body": "a", "url": "u", "lang": "en", "n": float("inf")},
            "the field n is inf, which JSON has no number for",
        ),
        ({"body": "a", "url": "u", "lang": "en", "n": "\ud800"}, "the field n holds a lone surrogate"),
        ({"body": "a", "url": None, "lang": "en"}, "the field url is null"),
    ],
)
def test_fields_that_are_named_must_be_there_and_kept_ones_be_plain(tmp_path: Path, row: object, reason: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(row))
    columns = Columns(text="body", id="url", source="lang", keep=("n",))
    (bad,) = read_records(find_files([str(tmp_path / "in.jsonl")]), columns=columns)
    assert isinstance(bad, BadRecord)
    assert bad.reason.startswith(reason)


def test_columns_that_are_named_twice_or_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep names a twice"):
        Columns(keep=("a", "b", "a"))
    pq.write_table(pa.table({"text": ["c"]}), tmp_path / "t.parquet")
    with pytest.raises(
        ValueError, match=r"has no column 'url' \(its columns: text\): name the right one with id_column"
    ):
        list(read_records(find_files([str(tmp_path / "t.parquet")]), columns=Columns(id="url")))


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "folder/in.txt", "in.parquet"])
def test_a_record_longer_than_the_bound_is_refused_and_its_neighbours_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    texts = ["first", "x" * 3_000_000, "last"]
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts}), path)
    elif name.endswith(".txt"):
        path.write_text(texts[1])
    else:
        data = jsonl(*({"text": text} for text in texts))
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    given = path.parent if name.endswith(".txt") else path
    found = list(read_records(find_files([str(given)]), longest=1_000_000))
    bad = [record for record in found if isinstance(record, BadRecord)]
    assert [record.text for record in found if isinstance(record, Document)] == (
        ["first", "last"] if len(found) > 1 else []
    )
    assert len(bad) == 1
    assert "the 1,000,000 " in bad[0].reason
    assert len(bad[0].raw) <= 1 << 16
    for number, record in enumerate(found):
        rest = list(read_records(find_files([str(given)]), longest=1_000_000, start=record.place.cursor))
        assert [str(one.place) for one in rest] == [str(one.place) for one in found[number:]]
