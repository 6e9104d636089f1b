"""convert: every format to every other, nothing lost that the new one holds, and what is lost is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqmesh.loader.catalog import FormatName
from seqmesh.loader.errors import ShardError
from seqmesh.loader.manifest import read_manifest
from seqmesh.tools.sets.convert import ConvertOptions, convert_set
from seqmesh.tools.sets.megatron import id_type
from seqmesh.tools.shard_writer import write_shards
from tests.formats import MEGATRON_CODES, table_of, write_all, write_arrow, write_megatron, write_parquet
from tests.support import documents_of
from tests.tools.sets.sets import VOCAB, a_set, assert_whole, bytes_of, rows_of

DOCUMENTS = documents_of([3, 9, 1, 14, 2, 2, 30, 7] * 3, vocab=VOCAB)
SOURCES = ["web", "code", "books"] * 8
TARGETS: list[Any] = [None, [(0, 2), (5, 9)], [], [(3, 4)], None, [(0, 1)], [], [(2, 7)]] * 3
FORMATS: tuple[FormatName, ...] = ("seqmesh", "parquet", "huggingface", "megatron")


def convert(data: Path | str, out: Path, to: FormatName, **options: Any) -> list[str]:
    """What was said."""
    heard: list[str] = []
    settings: dict[str, Any] = {"vocab_size": VOCAB, "shard_tokens": 90} | options
    convert_set(str(data), out, ConvertOptions(to=to, **settings), say=heard.append)
    return heard


def plain(rows: list[Any]) -> list[Any]:
    return [row[2] for row in rows]


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_any_format_becomes_any_other_and_comes_back(tmp_path: Path, source: FormatName, to: FormatName) -> None:
    folders = write_all(tmp_path, DOCUMENTS, vocab=VOCAB)
    if source == to:
        with pytest.raises(ValueError, match=f"is {to} data already"):
            convert(folders[source], tmp_path / "out", to)
        return
    convert(folders[source], tmp_path / "out", to)
    wanted = [document.tolist() for document in DOCUMENTS]
    assert plain(rows_of(tmp_path / "out", VOCAB)) == wanted
    convert(tmp_path / "out", tmp_path / "back", source)
    assert plain(rows_of(tmp_path / "back", VOCAB)) == wanted
    convert(folders[source], tmp_path / "again", to)
    assert bytes_of(tmp_path / "again") == bytes_of(tmp_path / "out")
    if to == "seqmesh":
        assert_whole(tmp_path / "out")


@pytest.mark.parametrize(("vocab", "dtype"), [(VOCAB, "uint16"), (65_499, "uint16"), (65_500, "int32")])
def test_megatron_data_comes_back_byte_for_byte(tmp_path: Path, vocab: int, dtype: str) -> None:
    assert id_type(vocab) == np.dtype(dtype)
    assert dtype in MEGATRON_CODES
    prefix = write_megatron(tmp_path / "in" / "text_document", documents_of([5, 1, 9, 3], vocab=vocab), dtype)
    convert(prefix, tmp_path / "set", "seqmesh", vocab_size=vocab)
    heard = convert(tmp_path / "set", tmp_path / "out", "megatron", vocab_size=None)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "in")
    assert heard[0] == "not kept: the ids of documents (doc_id); megatron has none"


def test_documents_of_several_sequences_become_whole_ones(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "in" / "text", DOCUMENTS, sequences=3)
    heard = convert(prefix, tmp_path / "out", "parquet")
    assert plain(rows_of(tmp_path / "out", VOCAB)) == [document.tolist() for document in DOCUMENTS]
    assert heard == ["not kept: which 60 sequences the 24 documents consist of"]


def test_empty_documents_stay_where_the_format_holds_them(tmp_path: Path) -> None:
    documents = [np.zeros(0, np.int64), *DOCUMENTS[:3], np.zeros(0, np.int64)]
    data = write_parquet(tmp_path / "in", table_of(documents))
    wanted = [document.tolist() for document in documents]
    for to in ("huggingface", "megatron"):
        convert(data, tmp_path / to, to)
        assert plain(rows_of(tmp_path / to, VOCAB)) == wanted
    assert convert(data, tmp_path / "set", "seqmesh") == ["left out: 2 empty documents; a shard set holds none"]
    assert plain(rows_of(tmp_path / "set")) == wanted[1:4]
    assert read_manifest(tmp_path / "set").counts["empty"] == 2
    assert_whole(tmp_path / "set")


def test_a_hugging_face_dataset_comes_back_with_equal_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    flat = [None if each is None else [end for span in each for end in span] for each in TARGETS]
    columns = {
        "input_ids": [document.tolist() for document in DOCUMENTS],
        "doc_id": [f"name {number}" for number in range(len(DOCUMENTS))],
        "source": SOURCES,
        "targets": flat,
    }
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns | {"url": SOURCES}).save_to_disk(tmp_path / "in", num_shards=2)
    assert convert(tmp_path / "in", tmp_path / "set", "seqmesh") == ["not kept: the columns url"]
    assert_whole(tmp_path / "set")
    heard = convert(tmp_path / "set", tmp_path / "out", "huggingface", vocab_size=None)
    assert heard == ["not kept: the vocabulary's size, 1000; who reads huggingface data must be told"]
    found = datasets.load_from_disk(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("data-*-of-00003.arrow"))) == 3
    assert found.to_dict() == columns
    assert convert(tmp_path / "set", tmp_path / "table", "parquet", vocab_size=None)
    table = pq.read_table(tmp_path / "table")
    assert table.to_pydict() == columns
    assert table.schema.field("input_ids").type.value_type == pa.uint16()


def test_names_that_are_numbers_or_missing_become_names(tmp_path: Path) -> None:
    table = table_of(DOCUMENTS).append_column("doc_id", pa.array([None, *range(1, 24)]))
    convert(write_arrow(tmp_path / "in", table, files=2, rows=5), tmp_path / "set", "seqmesh")
    wanted = ["data-00000-of-00002.arrow:0", *map(str, range(1, 24))]
    assert [row[0] for row in rows_of(tmp_path / "set")] == wanted
    convert(write_arrow(tmp_path / "other", table_of(DOCUMENTS), files=2, rows=5), tmp_path / "named", "seqmesh")
    names = [row[0].rpartition(":") for row in rows_of(tmp_path / "named")]
    assert [int(name[2]) for name in names] == [*range(12), *range(12)]
    write_megatron(tmp_path / "megatron" / "x", DOCUMENTS)
    convert(tmp_path / "megatron", tmp_path / "of-megatron", "seqmesh")
    assert [row[0] for row in rows_of(tmp_path / "of-megatron")] == [f"x.bin:{number}" for number in range(24)]


def test_an_empty_dataset_opens_with_the_library_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_shards(tmp_path / "set", [], vocab_size=VOCAB)
    for to in FORMATS[1:]:
        convert(tmp_path / "set", tmp_path / to, to)
        assert rows_of(tmp_path / to, VOCAB) == []
    assert len(datasets.load_from_disk(tmp_path / "huggingface")) == 0


def test_what_megatron_does_not_hold_is_said(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", DOCUMENTS, vocab_size=VOCAB, eod_id=7, sources=SOURCES, targets=TARGETS)
    assert convert(tmp_path / "set", tmp_path / "out", "megatron") == [
        "not kept: the ids of documents (doc_id); megatron has none",
        "not kept: the sources of documents (web, code, books); megatron has none",
        "not kept: supervised spans (targets): everything will be supervised; megatron has none",
        "not kept: the vocabulary's size, 1000, and that id 7 ends documents; who reads megatron data must be told",
    ]


def test_a_set_of_other_data_knows_the_tokenizer_that_it_is_told(tmp_path: Path, tokenizer_path: Path) -> None:
    data = write_parquet(tmp_path / "in", table_of(documents_of([5, 7], vocab=300)))
    convert(data, tmp_path / "set", "seqmesh", vocab_size=None, tokenizer=tokenizer_path)
    manifest = read_manifest(tmp_path / "set")
    assert (manifest.vocab_size, manifest.eod_id) == (400, 0)
    assert (tmp_path / "set" / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()
    assert_whole(tmp_path / "set")
    with pytest.raises(ValueError, match=r"vocab_size is 500: .* has 400 entries"):
        convert(data, tmp_path / "other", "seqmesh", vocab_size=500, tokenizer=tokenizer_path)
    convert(tmp_path / "set", tmp_path / "hf", "huggingface", vocab_size=None)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()


def test_ids_outside_the_vocabulary_are_refused_in_every_format(tmp_path: Path) -> None:
    folders = {
        "huggingface": write_arrow(tmp_path / "hf", table_of(DOCUMENTS)),
        "megatron": write_megatron(tmp_path / "megatron" / "x", DOCUMENTS),
        "parquet": write_parquet(tmp_path / "parquet", table_of(DOCUMENTS)),
    }
    for source, folder in folders.items():
        with pytest.raises(ShardError, match=r"row \d+ holds the id \d+: must be below vocab_size, 100"):
            convert(folder, tmp_path / "out", "megatron" if source != "megatron" else "parquet", vocab_size=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron", "parquet"]


def test_what_is_missing_or_unfit_is_named(tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "in", table_of(DOCUMENTS))
    with pytest.raises(ValueError, match="vocab_size is missing"):
        convert(data, tmp_path / "out", "seqmesh", vocab_size=None)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "out", "seqmesh")
    with pytest.raises(ValueError, match="shard_tokens is 0"):
        convert(data, tmp_path / "out", "huggingface", shard_tokens=0)
    with pytest.raises(ValueError, match="to is 'csv': must be one of seqmesh"):
        convert(data, tmp_path / "out", "csv")  # type: ignore[arg-type]  # what a person may type
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_data_at_a_url_is_converted(tmp_path: Path) -> None:
    folder = a_set(tmp_path / "set", 20, sources=["a", "b"] * 10)
    fsspec.filesystem("memory").put(str(folder), "/convert-set", recursive=True)
    convert("memory://convert-set", tmp_path / "far", "parquet")
    convert(folder, tmp_path / "near", "parquet")
    assert bytes_of(tmp_path / "far") == bytes_of(tmp_path / "near")
    fsspec.filesystem("memory").put(str(tmp_path / "far"), "/convert-table", recursive=True)
    convert("memory://convert-table", tmp_path / "back", "seqmesh")
    assert rows_of(tmp_path / "back") == rows_of(folder)
