"""Inputs that nobody means to give: the command ends with a sentence that names them, or with the right set."""

from __future__ import annotations

import functools
import gzip
import json
import os
import resource
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from seqmesh.loader.manifest import MANIFEST_NAME, read_manifest
from seqmesh.tools.cli import USER_ERRORS, app
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.prepare_report import Progress
from seqmesh.tools.units import cut
from seqmesh.tools.verify import verify_set
from tests.warm import forked

TWO = b'{"text": "some words"}\n{"text": "and others"}\n'


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


@pytest.fixture
def tokenizer(tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its path. The test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return str(tokenizer_path)


def said(*inputs: str, tokenizer: str, options: tuple[str, ...] = ()) -> str:
    """What the command complains of; empty where it makes a whole set."""
    command = ["prepare", *inputs, "--out", "out", "--tokenizer", tokenizer, *options]
    try:
        result = CliRunner().invoke(app, command, catch_exceptions=False)
    except USER_ERRORS as error:
        assert not Path("out", MANIFEST_NAME).exists()
        return str(error)
    assert result.exit_code == 0
    assert verify_set(Path("out")) == []
    return ""


@pytest.mark.parametrize(
    ("name", "data", "documents"),
    [
        ("bom.jsonl", b"\xef\xbb\xbf" + TWO, 2),
        ("carriage.jsonl", TWO.replace(b"\n", b"\r\n"), 2),
        ("padded.jsonl.gz", gzip.compress(TWO, mtime=0) + bytes(512), 2),
        ("two.jsonl.gz", gzip.compress(TWO, mtime=0) * 2, 4),
        ("two.jsonl.zst", zstd(TWO) * 2, 4),
        ("nothing.jsonl", b"", 0),
        ("nul.jsonl", b'{"text": "a\\u0000b"}', 1),
        ("number.jsonl", b'{"text": "a", "id": ' + b"9" * 400 + b"}", 1),
        ("keys.jsonl", b'{"text": 1, "text": "the last of equal keys counts"}', 1),
        ("equal.jsonl", b'{"text": "a", "id": 1}\n{"text": "b", "id": "1"}\n', 2),
        ("a[1]*.jsonl", TWO, 2),
    ],
)
def test_odd_input_makes_the_right_set(name: str, data: bytes, documents: int, tokenizer: str) -> None:
    Path(name).write_bytes(data)
    assert said(name, tokenizer=tokenizer) == ""
    assert read_manifest(Path("out")).documents == documents


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("wide.jsonl", TWO.decode().encode("utf-16"), "line 1 (byte offset 0): invalid UTF-8 at byte 0"),
        ("nul.jsonl", TWO + bytes(99), f"line 3 (byte offset {len(TWO)}): not JSON"),
        ("half.jsonl", b'{"text": "\\ud800"}', "the field text holds a lone surrogate at character 0"),
        ("name.jsonl", b'{"text": "a", "id": "\\udfff"}', "the field id holds a lone surrogate at character 0"),
        ("digits.jsonl", b'{"text": "a", "id": ' + b"9" * 5000 + b"}", "JSON beyond the parser's limits"),
        ("tail.jsonl.gz", gzip.compress(TWO, mtime=0) + b"tail", "after line 0: Not a gzipped file"),
        ("plain.jsonl.gz", TWO, "after line 0: Not a gzipped file"),
        ("cut.jsonl.zst", zstd(TWO)[:-3], "Truncated compressed stream"),
        ("tail.jsonl.zst", zstd(TWO) + b"tail", "Unknown frame descriptor"),
        ("nothing.parquet", b"", "cut short, damaged, or no Parquet file"),
        ("nothing.arrow", b"", "cut short, damaged, or no Arrow file"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, data: bytes, words: str, tokenizer: str) -> None:
    Path(name).write_bytes(data)
    message = said(name, tokenizer=tokenizer)
    assert name in message
    assert words in message


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": [{"a": "b"}]}, "row 0 (row group 0, both counted from 0): the field text is an object, not a string"),
        ({"text": [["a"]]}, "the field text is a list, not a string"),
        ({"text": ["a"], "id": [0.5]}, "the field id is a number, not a string or an integer"),
        ({"text": [b"\xff"]}, "the field text is binary data, not a string"),
        ({"texts": ["a"]}, "has no column 'text'"),
    ],
)
def test_columns_of_other_types_are_named(columns: dict[str, list[object]], words: str, tokenizer: str) -> None:
    pq.write_table(pa.table(columns), "t.parquet")
    message = said("t.parquet", tokenizer=tokenizer)
    assert message.startswith("t.parquet") and words in message


def test_links_that_lead_round_or_nowhere_are_named(tokenizer: str) -> None:
    Path("in/deep").mkdir(parents=True)
    Path("in/a.jsonl").write_bytes(TWO)
    Path("in/deep/loop").symlink_to("../..")
    assert said("in", tokenizer=tokenizer).startswith("in/deep/loop is a link to a folder, which is not followed")
    Path("in/deep/loop").unlink()
    Path("in/b.jsonl").symlink_to("nowhere")
    assert "in/b.jsonl" in said("in", tokenizer=tokenizer)
    Path("self").symlink_to("self")
    assert said("self", tokenizer=tokenizer) == "no such input: self"


def test_a_name_that_is_not_text_is_shown(tokenizer: str) -> None:
    Path("in").mkdir()
    Path(os.fsdecode(b"in/\xff.jsonl")).write_bytes(TWO)
    assert said("in", tokenizer=tokenizer).startswith(r"'in/\udcff.jsonl': this name is not UTF-8")


def test_a_file_that_is_given_twice_is_read_twice(tokenizer: str) -> None:
    Path("a.jsonl").write_bytes(TWO)
    Path("b.jsonl").symlink_to("a.jsonl")
    assert said("a.jsonl", "./a.jsonl", "b.jsonl", tokenizer=tokenizer, options=("--dedup",)) == ""
    counts = read_manifest(Path("out")).counts
    assert (counts["documents_in"], counts["documents_out"], counts["duplicate"]) == (6, 2, 4)


def test_an_output_inside_the_input_is_not_read(
    texts: list[str], tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 1500)
    Path("in").mkdir()
    Path("in/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def options(out: str) -> PrepareOptions:
        return PrepareOptions(inputs=("in",), out=Path(out), tokenizer=tokenizer, shard_tokens=1000)

    def interrupt(progress: Progress) -> None:
        if progress.tokens > 6000:
            raise KeyboardInterrupt

    prepare(options("apart"))
    with pytest.raises(KeyboardInterrupt):
        prepare(options("in/set"), progress=interrupt)
    assert prepare(options("in/set")).resumed_tokens > 0
    for path in Path("apart").iterdir():
        assert (Path("in/set") / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(FileExistsError, match="in/set already holds a finished shard set"):
        prepare(options("in/set"))


def test_a_disk_without_room_is_named_and_a_later_run_goes_on(texts: list[str], tokenizer: str) -> None:
    """Files may grow to 20 kB, then to any size."""
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 2))
    command = ["-m", "seqmesh.tools.cli", "prepare", "a.jsonl", "--out", "out", "--tokenizer", tokenizer]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000))
    with forked(command, before=limit) as process:
        output, _ = process.communicate()
    assert process.returncode == 1
    assert "error: " in output and "File too large" in output and "Traceback" not in output
    assert not Path("out", MANIFEST_NAME).exists()
    assert said("a.jsonl", tokenizer=tokenizer) == ""
    assert read_manifest(Path("out")).documents == 2 * len(texts)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tokenizer: str) -> None:
    Path("a.jsonl").write_bytes(TWO)
    Path("a.jsonl").chmod(0)
    assert "a.jsonl" in said("a.jsonl", tokenizer=tokenizer)
