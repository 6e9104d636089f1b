"""The command verify: whatever is wrong with a set is named, all of it, by file."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from seqmesh.loader.files import checksum
from seqmesh.loader.manifest import LENGTHS_NAME, MANIFEST_NAME
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.shard_writer import write_shards
from seqmesh.tools.verify import run, verify_set

DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1], [2, 3]]
FIRST, SECOND = "shard-00000.arrow", "shard-00001.arrow"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five documents in two shards: 3 + 2 tokens, then 4 + 1 + 2."""
    write_shards(tmp_path / "set", DOCUMENTS, vocab_size=100, sources=["a", "b", "a", "b", "a"], shard_tokens=7)
    return tmp_path / "set"


def problems(folder: Path) -> list[tuple[str, str]]:
    return [(problem.file, problem.what) for problem in verify_set(folder) if not problem.warning]


def printed(folder: Path, *, terminal: bool = False) -> str:
    output = io.StringIO()
    run(folder=folder, console=Console(file=output, width=160, force_terminal=terminal))
    return output.getvalue()


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_shard(folder: Path, number: int, **changes: Any) -> None:
    shards = json.loads((folder / MANIFEST_NAME).read_text())["shards"]
    shards[number] |= changes
    edit_manifest(folder, shards=shards)


def rewrite(folder: Path, name: str, batches: Sequence[pa.RecordBatch], *, schema: pa.Schema | None = None) -> None:
    """Put another content into a file of the set, with a manifest that agrees to its bytes."""
    path = folder / name
    with pa.ipc.new_file(str(path), schema or batches[0].schema) as file:
        for batch in batches:
            file.write_batch(batch)
    facts = {"bytes": path.stat().st_size, "xxh3": checksum(path)}
    if name == LENGTHS_NAME:
        edit_manifest(folder, lengths=json.loads((folder / MANIFEST_NAME).read_text())["lengths"] | facts)
    else:
        edit_shard(folder, int(name[6:11]), **facts)


def shard(
    ids: Sequence[int] = (1, 2, 3, 4, 5),
    offsets: Sequence[int] = (0, 3, 5),
    sources: Sequence[int] = (0, 1),
    **other: Any,
) -> pa.RecordBatch:
    """A first shard as the writer would make it, but for what is given."""
    # Straight from buffers: Arrow's own constructor refuses what a damaged disk may hold.
    values = pa.array(ids, pa.uint16())
    buffers = [None, pa.py_buffer(np.array(offsets, np.int64).tobytes())]
    lists = pa.Array.from_buffers(pa.large_list(pa.uint16()), len(offsets) - 1, buffers, children=[values])
    columns = {
        "input_ids": lists,
        "doc_id": pa.array(["0", "1"], pa.large_string()),
        "source": pa.array(sources, pa.uint16()),
    }
    columns |= other
    return pa.record_batch(list(columns.values()), names=list(columns))


def test_a_whole_set_is_ok(folder: Path) -> None:
    assert verify_set(folder) == []
    for terminal in (False, True):
        output = printed(folder, terminal=terminal)
        assert f"{folder}: ok" in output
        assert "12" in output


def test_sets_of_prepare_and_sets_without_documents_are_ok(tmp_path: Path, tokenizer_path: Path) -> None:
    write_shards(tmp_path / "none", [])
    assert verify_set(tmp_path / "none") == []
    (tmp_path / "in.jsonl").write_text('{"text": "hello"}\nbad\n\n{"text": ""}\n{"text": "world", "source": "x"}\n')
    prepare(
        PrepareOptions(
            inputs=(str(tmp_path / "in.jsonl"),), out=tmp_path / "out", tokenizer=str(tokenizer_path), on_error="skip"
        )
    )
    assert verify_set(tmp_path / "out") == []


def test_a_rewritten_shard_that_is_right_is_ok(folder: Path) -> None:
    """So that the tests below find what they put in, not the rewriting."""
    rewrite(folder, FIRST, [shard()])
    assert verify_set(folder) == []
    rewrite(folder, FIRST, [shard().slice(0, 1), shard().slice(1, 1)])
    assert verify_set(folder) == []


def test_every_problem_is_listed_by_file(folder: Path) -> None:
    (folder / SECOND).unlink()
    data = bytearray((folder / FIRST).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / FIRST).write_bytes(data)
    size = (folder / LENGTHS_NAME).stat().st_size
    with (folder / LENGTHS_NAME).open("r+b") as file:
        file.truncate(size - 8)
    (folder / "notes.txt").write_text("mine")
    found = dict(problems(folder))
    assert found.keys() == {FIRST, SECOND, LENGTHS_NAME}
    assert found[SECOND] == "is missing"
    assert found[LENGTHS_NAME] == f"is cut short: {size - 8:,} bytes, the manifest says {size:,}"
    output = io.StringIO()
    with pytest.raises(ValueError, match=rf"{folder} is not whole: \d problems in 3 files"):
        run(folder=folder, console=Console(file=output, width=160))
    for name in (FIRST, SECOND, LENGTHS_NAME, "warning: is not part of the set"):
        assert name in output.getvalue()


def test_a_flipped_bit_anywhere_is_found_and_breaks_nothing(folder: Path) -> None:
    rng = random.Random(0)
    for name in (FIRST, LENGTHS_NAME):
        whole = (folder / name).read_bytes()
        for place in range(rng.randrange(3), len(whole), 3):
            data = bytearray(whole)
            data[place] ^= 1 << rng.randrange(8)
            (folder / name).write_bytes(data)
            assert any(file == name and "checksum is" in what for file, what in problems(folder)), place
        (folder / name).write_bytes(whole)
    assert problems(folder) == []


def test_one_problem_is_one_problem(folder: Path) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes() + b"\0")
    with pytest.raises(ValueError, match="is not whole: 1 problem in 1 file; copy the set again"):
        printed(folder)
    assert "too long" in problems(folder)[0][1]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (shard(ids=(1, 2, 3, 100, 255)), "2 ids are not below the vocabulary's size, 100"),
        (shard(offsets=(0, 6, 5)), "offsets reach from 0 to 6: there are 5 ids"),
        (shard(offsets=(0, 6, 5)), "the offsets of 1 documents run backwards"),
        (shard(offsets=(0, 2, 5)), "the lengths of 2 documents are not those of the lengths index"),
        (shard(ids=(1, 2, 3, 4), offsets=(0, 3, 4)), "holds 4 tokens, the manifest says 5"),
        (shard(sources=(0, 2)), "the source codes of 1 documents are not among the manifest's 2 sources"),
        (shard(sources=(0, 1)).slice(0, 1), "holds 1 rows, the manifest says 2"),
        (shard(doc_id=pa.array(["0", None], pa.large_string())), "the column doc_id has 1 nulls"),
        (shard(doc_id=pa.array(["0", "1"])), "the column doc_id is string, not large_string or int64"),
        (
            shard(doc_id=pa.array([b"0", b"\xff"], pa.large_binary()).view(pa.large_string())),
            "the column doc_id is damaged",
        ),
        (shard(source=pa.array([0, 1])), "the column source is int64, not uint16"),
        (
            shard(targets=pa.array([[0, 1], [0, 1]])),
            "the column targets is list<item: int64>, not large_list<",
        ),
        (shard().rename_columns(["input_ids", "input_ids", "source"]), "two of its columns have the same name"),
        (shard().select(["doc_id", "source"]), "has no column input_ids"),
        (
            shard(input_ids=pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.uint16()))),
            "the column input_ids is list<item: uint16>, not large_list<item: uint16>",
        ),
    ],
)
def test_a_shard_that_breaks_a_rule_is_named(folder: Path, batch: pa.RecordBatch, expected: str) -> None:
    rewrite(folder, FIRST, [batch])
    found = problems(folder)
    assert {name for name, _ in found} == {FIRST}
    assert any(expected in what for _, what in found), found


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ((0, 3, 4), "1 ids belong to no document"),
        ((1, 3, 5), "1 ids belong to no document"),
        ((-1, 3, 4), "is not readable as an Arrow file: "),
        ((0, 3, 1 << 40), "is not readable as an Arrow file: "),
    ],
)
def test_offsets_that_no_writer_would_write_are_named(
    folder: Path, offsets: tuple[int, int, int], expected: str
) -> None:
    data = (folder / FIRST).read_bytes()
    before, after = (np.array(values, np.int64).tobytes() for values in ((0, 3, 5), offsets))
    assert data.count(before) == 1
    (folder / FIRST).write_bytes(data.replace(before, after))
    edit_shard(folder, 0, xxh3=checksum(folder / FIRST))
    found = problems(folder)
    assert {name for name, _ in found} == {FIRST}
    assert any(expected in what for _, what in found), found


def span_column(offsets: Sequence[int], values: Sequence[int | None]) -> Any:
    """A column of spans for two documents, the second of which may have none; straight from buffers."""
    buffers = [None, pa.py_buffer(np.array(offsets, np.int64).tobytes())]
    child = pa.array(values, pa.int32())
    return pa.Array.from_buffers(pa.large_list(pa.int32()), len(offsets) - 1, buffers, children=[child])


def test_spans_that_are_right_are_ok(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", DOCUMENTS, vocab_size=100, targets=[[(0, 2)], None, [], None, None], shard_tokens=7)
    assert verify_set(tmp_path / "set") == []
    shards = [pa.ipc.open_file(str(tmp_path / "set" / FIRST)).get_batch(0)]
    rewrite(tmp_path / "set", FIRST, [shards[0].slice(0, 1), shards[0].slice(1, 1)])
    assert verify_set(tmp_path / "set") == []


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (span_column((0, 2, 4), (0, 3, 0, 2)), None),
        (span_column((0, 2, 4), (0, 1, 0, 2)), "the supervised tokens of 1 documents are not as many as the lengths"),
        (span_column((0, 2, 2), (0, 3)), "the supervised tokens of 1 documents are not as many as the lengths"),
        (span_column((0, 2, 4), (0, 3, 0, 3)), "the spans of 1 documents are not ascending ranges of their tokens"),
        (span_column((0, 4, 6), (1, 3, 0, 1, 0, 2)), "the spans of 1 documents are not ascending ranges of"),
        (span_column((0, 3, 4), (0, 3, 0, 2)), "the spans of 2 documents are not ascending ranges of their tokens"),
        (span_column((0, 2, 3), (0, 3, 0)), "the spans of 1 documents are not ascending ranges of their tokens"),
        (span_column((0, 9, 4), (0, 3, 0, 2)), "offsets reach from 0 to 9: there are 4 ends of spans"),
        (span_column((0, 2, 4), (0, 3, None, 2)), "the spans in the column targets have 1 nulls"),
    ],
)
def test_spans_that_break_a_rule_are_named(folder: Path, targets: Any, expected: str | None) -> None:
    rewrite(folder, FIRST, [shard(targets=targets)])
    found = problems(folder)
    assert {name for name, _ in found} == ({FIRST} if expected else set())
    assert expected is None or any(expected in what for _, what in found), found


def test_an_index_that_forgets_the_spans_is_named(tmp_path: Path) -> None:
    for name, targets in (("with", [[(0, 2)], None]), ("without", None)):
        write_shards(tmp_path / name, DOCUMENTS[:2], targets=targets)
    index = pa.ipc.open_file(str(tmp_path / "without" / LENGTHS_NAME)).get_batch(0)
    other = pa.ipc.open_file(str(tmp_path / "with" / LENGTHS_NAME)).get_batch(0)
    for name, batch in (("with", index), ("without", other)):
        rewrite(tmp_path / name, LENGTHS_NAME, [batch])
        assert problems(tmp_path / name) == [
            (FIRST, "the supervised tokens of 1 documents are not as many as the lengths index says")
        ]


def test_names_that_are_numbers_are_fine(folder: Path) -> None:
    rewrite(folder, FIRST, [shard(doc_id=pa.array([0, 1]))])
    assert problems(folder) == []


@pytest.mark.parametrize(
    ("lengths", "supervised", "expected"),
    [
        ([3, 2, 4, 1, 2], [2, 1, 3, 1, 1], "the numbers of supervised tokens of 1 documents do not follow from their"),
        ([2, 3, 4, 1, 2], [1, 2, 3, 0, 1], None),
        ([3, 2, 4, 0, 3], [2, 1, 3, 0, 2], "1 documents have no length"),
        ([3, 2, 4, 1], [2, 1, 3, 0], "holds 4 rows, the manifest says 5"),
        ([3, 2, 4, 1, 3], [2, 1, 3, 0, 2], "holds 13 tokens, the manifest says 12"),
        ([3, 2, 4, 1, None], [2, 1, 3, 0, 1], "the column length has 1 nulls"),
    ],
)
def test_a_lengths_index_that_breaks_a_rule_is_named(
    folder: Path, lengths: list[int | None], supervised: list[int], expected: str | None
) -> None:
    batch = pa.record_batch([pa.array(lengths), pa.array(supervised)], names=["length", "supervised"])
    rewrite(folder, LENGTHS_NAME, [batch])
    found = problems(folder)
    if expected is None:  # right in itself: it is the shard that contradicts it
        assert found == [(FIRST, "the lengths of 2 documents are not those of the lengths index")]
    else:
        assert any(name == LENGTHS_NAME and expected in what for name, what in found), found


@pytest.mark.parametrize(
    ("changes", "file", "expected"),
    [
        ({"vocab_size": 9}, SECOND, "1 ids are not below the vocabulary's size, 9"),
        ({"sources": ["a"]}, FIRST, "the source codes of 1 documents are not among"),
        ({"sources": ["a", "a"]}, MANIFEST_NAME, "names a source twice"),
        ({"eod_id": 100}, MANIFEST_NAME, "eod_id is 100: not in a vocabulary of 100"),
        ({"counts": {"tokens_out": 13}}, MANIFEST_NAME, "counts.tokens_out is 13: the shards have 12"),
        (
            {"counts": {"documents_in": 7, "documents_out": 5, "empty": 1, "refused": 0}},
            MANIFEST_NAME,
            "counts.documents_in is 7: documents_out and all left out make 6",
        ),
        ({"format": 2}, MANIFEST_NAME, "format is 2"),
        ({"lengths": 3}, MANIFEST_NAME, "is not a valid manifest"),
    ],
)
def test_an_edited_manifest_is_named(folder: Path, changes: dict[str, Any], file: str, expected: str) -> None:
    edit_manifest(folder, **changes)
    assert any(name == file and expected in what for name, what in problems(folder)), problems(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"xxh3": "0" * 32}, f"the manifest says {'0' * 32}"),
        ({"bytes": 5}, "is too long"),
        ({"file": "shard-00001.arrow"}, "its checksum is"),
        ({"file": "gone.arrow"}, "is missing"),
    ],
)
def test_an_edited_entry_is_named_by_its_file(folder: Path, changes: dict[str, Any], expected: str) -> None:
    if changes.get("file") == SECOND:  # as long as the first, so that only its content tells
        changes = changes | {"bytes": (folder / SECOND).stat().st_size}
    edit_shard(folder, 0, **changes)
    name = changes.get("file", FIRST)
    assert any(file == name and expected in what for file, what in problems(folder)), problems(folder)
    if name == SECOND:
        assert (MANIFEST_NAME, f"names {SECOND} 2 times") in problems(folder)


def test_other_files_are_warnings_only(folder: Path) -> None:
    for name in ("extra.arrow", "progress.jsonl", "prepare.lock", "shard-00009.arrow.tmp"):
        (folder / name).write_bytes(b"")
    assert problems(folder) == []
    assert {(problem.file, problem.what) for problem in verify_set(folder)} == {
        ("extra.arrow", "is not part of the set"),
        ("prepare.lock", "is left of a run of prepare that did not end"),
        ("progress.jsonl", "is left of a run of prepare that did not end"),
        ("shard-00009.arrow.tmp", "is left of a run of prepare that did not end"),
    }
    assert "ok" in printed(folder)


def test_the_tokenizer_and_the_quarantine_belong_to_the_set(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "hello"}\nbad\n')
    out = tmp_path / "out"
    prepare(
        PrepareOptions(inputs=(str(tmp_path / "in.jsonl"),), out=out, tokenizer=str(tokenizer_path), on_error="skip")
    )
    data = (out / "tokenizer.json").read_bytes()
    for damaged, message in (
        (data.replace(b"\n", b" ", 1), "is not the tokenizer of this set: its fingerprint is not"),
        (data[:-9], "is not a tokenizer.json that the tokenizers library reads"),
    ):
        (out / "tokenizer.json").write_bytes(damaged)
        ((name, what),) = problems(out)
        assert name == "tokenizer.json"
        assert message in what
    (out / "tokenizer.json").write_bytes(data)
    (out / "quarantine.jsonl").write_bytes(b"")
    assert problems(out) == [("quarantine.jsonl", "holds 0 records, the manifest says 1 were refused")]


def test_a_folder_without_a_manifest_is_no_set(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a finished shard set"):
        run(folder=tmp_path)
