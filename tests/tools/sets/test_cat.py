"""cat: documents by name, number or all, as text that is the text that went in."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.sets.cat import CatOptions, run, shown
from tests.tools.sets.sets import VOCAB, a_set, bytes_of, rows_of


@pytest.fixture
def prepared(tmp_path: Path, texts: list[str], tokenizer_path: Path) -> Path:
    lines = [{"text": text, "id": f"t{i}", "source": "ab"[i % 2]} for i, text in enumerate(texts[:20])]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return _prepare(tmp_path / "in.jsonl", tmp_path / "set", tokenizer_path)


def _prepare(data: Path, out: Path, tokenizer: Path) -> Path:
    prepare(PrepareOptions(inputs=(str(data),), out=out, tokenizer=str(tokenizer), shard_tokens=1500))
    return out


def test_text_goes_to_shards_and_comes_back(prepared: Path, texts: list[str]) -> None:
    assert list(shown(str(prepared), CatOptions())) == texts[:20]
    assert list(shown(str(prepared), CatOptions(limit=3))) == texts[:3]
    assert list(shown(str(prepared), CatOptions(limit=0))) == []


def test_json_lines_prepare_to_the_same_set(prepared: Path, tmp_path: Path, tokenizer_path: Path) -> None:
    lines = list(shown(str(prepared), CatOptions(json=True)))
    (tmp_path / "again.jsonl").write_text("\n".join(lines) + "\n")
    again = _prepare(tmp_path / "again.jsonl", tmp_path / "again", tokenizer_path)
    assert bytes_of(again) == bytes_of(prepared)


def test_documents_are_found_by_id_and_row_in_the_order_asked_for(prepared: Path, texts: list[str]) -> None:
    options = CatOptions(doc_ids=("t17", "t2"), rows=(5, 0))
    assert list(shown(str(prepared), options)) == [texts[17], texts[2], texts[5], texts[0]]


def test_an_id_that_is_not_there_is_named_before_anything_is_printed(prepared: Path) -> None:
    output = io.StringIO()
    with pytest.raises(ValueError, match="has no document with the id 'nobody'"):
        run(data=str(prepared), options=CatOptions(doc_ids=("t1", "nobody")), out=output)
    assert output.getvalue() == ""
    with pytest.raises(ValueError, match="has no document 20: it holds 20, counted from 0"):
        list(shown(str(prepared), CatOptions(rows=(20,))))


def test_ids_and_spans_are_shown_of_sets_without_a_tokenizer(tmp_path: Path) -> None:
    folder = a_set(tmp_path / "set", 9, name="x", targets=[[(0, 1)], None, []] * 3)
    rows = rows_of(folder)
    assert list(shown(str(folder), CatOptions(ids=True))) == [" ".join(map(str, row[2])) for row in rows]
    found = json.loads(next(shown(str(folder), CatOptions(ids=True, json=True, rows=(3,)))))
    assert found == {"id": "x3", "source": "all", "ids": rows[3][2], "targets": [[0, 1]]}
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json: show its documents as ids"):
        list(shown(str(folder), CatOptions()))


def test_an_id_of_several_documents_gives_all_of_them(tmp_path: Path) -> None:
    folder = a_set(tmp_path / "set", 9, name="x")
    a_set(tmp_path / "other", 4, name="x", seed=1)
    from seqmesh.tools.sets.merge import merge_sets

    merge_sets(tmp_path / "both", [str(folder), str(tmp_path / "other")])
    rows = rows_of(tmp_path / "both")
    wanted = [" ".join(map(str, rows[row][2])) for row in (2, 11)]
    assert list(shown(str(tmp_path / "both"), CatOptions(doc_ids=("x2",), ids=True))) == wanted


def test_other_formats_and_urls_are_shown(tmp_path: Path, prepared: Path, texts: list[str]) -> None:
    fsspec.filesystem("memory").put(str(prepared), "/cat-set", recursive=True)
    assert list(shown("memory://cat-set", CatOptions(doc_ids=("t3",)))) == [texts[3]]
    from seqmesh.tools.sets.convert import ConvertOptions, convert_set

    folder = a_set(tmp_path / "plain", 5)
    convert_set(str(folder), tmp_path / "hf", ConvertOptions(to="huggingface"))
    options = CatOptions(doc_ids=("d4",), ids=True, vocab_size=VOCAB)
    assert list(shown(str(tmp_path / "hf"), options)) == [" ".join(map(str, rows_of(folder)[4][2]))]


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path) -> None:
    folder = a_set(tmp_path / "set", 4000, shard_tokens=1 << 20)
    code = "import sys; sys.argv = ['seqmesh', *sys.argv[1:]]; from seqmesh.tools.cli import main; main()"
    command = [sys.executable, "-c", code, "cat", str(folder), "--ids"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0
