"""The command prepare: the same bytes every time, nothing mixed, nothing half-done that looks whole."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from seqmesh.loader.manifest import MANIFEST_NAME, read_manifest
from seqmesh.tools.prepare import PrepareOptions, prepare, run
from seqmesh.tools.prepare_report import PrepareReport, Progress
from seqmesh.tools.preparing import tokenizer as tokenizer_module
from seqmesh.tools.tokenizers.file import load_tokenizer
from seqmesh.tools.tokenizers.training import TRAIN_BYTES, train_tokenizer
from seqmesh.tools.units import cut as cut_module


@pytest.fixture
def jsonl(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def prepared(jsonl: Path, out: Path, tokenizer: Path | str, **options: Any) -> PrepareReport:
    return prepare(PrepareOptions(inputs=(str(jsonl),), out=out, tokenizer=str(tokenizer), **options))


def read_ids(folder: Path) -> list[Any]:
    tables = [pa.ipc.open_file(str(folder / shard.file)).read_all() for shard in read_manifest(folder).shards]
    return [row for table in tables for row in table.column("input_ids").to_pylist()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_decodes_to_its_text_and_ends_once(
    jsonl: Path, tmp_path: Path, texts: list[str], tokenizer_path: Path
) -> None:
    report = prepared(jsonl, tmp_path / "out", tokenizer_path, shard_tokens=3000)
    file = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    rows = read_ids(tmp_path / "out")
    assert [file.tokenizer.decode(row[:-1], skip_special_tokens=False) for row in rows] == texts
    assert all(row.count(0) == 1 and row[-1] == 0 for row in rows)
    manifest = report.manifest
    assert len(manifest.shards) > 2
    assert manifest.tokenizer == load_tokenizer(tokenizer_path).fingerprint
    assert (manifest.eod_id, manifest.sources) == (0, ("in",))
    assert report.left_out == {}


def test_engines_and_threads_and_places_do_not_change_the_bytes(jsonl: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from seqmesh.tools.prepare import PrepareOptions, prepare\n"
        "prepare(PrepareOptions(inputs=(sys.argv[1],), out=Path(sys.argv[2]), tokenizer='train:300',"
        " engine=sys.argv[3], shard_tokens=4000))\n"
    )
    runs = (("1", "tokenizers"), ("3", "tokenizers"), ("2", "tiktoken"))
    for threads, engine in runs:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(jsonl), str(tmp_path / f"{engine}{threads}"), engine],
            env={**os.environ, "RAYON_NUM_THREADS": threads},
            check=True,
        )
    first, *others = (contents(tmp_path / f"{engine}{threads}") for threads, engine in runs)
    assert len(first) > 4
    assert all(other == first for other in others)


def trouble(folder: Path, texts: list[str]) -> tuple[str, ...]:
    """Files of every kind with documents of odd sizes, named and not, and bad, empty and blank records between them."""
    rng = random.Random(4)
    pieces = ["".join(rng.choices(texts))[: int(rng.lognormvariate(5, 1.5))] for _ in range(300)]
    lines = [json.dumps({"text": text, "source": f"s{len(text) % 3}"} | ({"id": text[:9]} if len(text) % 2 else {}))
             for text in pieces]  # fmt: skip
    for at in range(5, 300, 20):
        lines[at] = rng.choice(["", "not json", '{"text": ""}', '{"text": 7}'])
    data = "\n".join(lines).encode()
    (folder / "files").mkdir()
    for number, text in enumerate(pieces[:40]):
        (folder / "files" / f"{number}.txt").write_text(text)
    (folder / "a.jsonl").write_bytes(data)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(data))
    pq.write_table(pa.table({"text": pieces}), folder / "small.parquet", row_group_size=20)
    pq.write_table(pa.table({"text": pieces}), folder / "large.parquet")
    return tuple(str(folder / name) for name in ("a.jsonl", "files", "small.parquet", "b.jsonl.gz", "large.parquet"))


def test_workers_and_the_size_of_units_do_not_change_the_bytes(
    tmp_path: Path, texts: list[str], tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = trouble(tmp_path, texts)
    common: dict[str, Any] = {"inputs": inputs, "tokenizer": str(tokenizer_path), "shard_tokens": 3000}
    common |= {"on_error": "skip", "dedup": True, "sample": 0.9, "max_document_tokens": 900}
    made: list[tuple[dict[str, bytes], Mapping[str, Mapping[str, int]]]] = []
    for workers, unit_bytes in ((1, 8 << 20), (1, 500), (2, 2000), (3, 30_000)):
        monkeypatch.setattr(cut_module, "UNIT_BYTES", unit_bytes)
        out = tmp_path / f"out{len(made)}"
        report = prepare(PrepareOptions(**common, out=out, workers=workers))
        made.append((contents(out), report.left_out))
        assert report.workers == workers
        assert set(report.stages) == {"reading", "encoding", "writing"}
        assert all(seconds > 0 for seconds in report.stages.values())
    counts = report.manifest.counts
    assert all(counts[name] > 3 for name in ("empty", "refused", "sampled_out", "too_long", "duplicate"))
    assert len(report.manifest.shards) > 8
    assert all(other == made[0] for other in made[1:])


def test_without_an_end_token_none_is_added(jsonl: Path, tmp_path: Path, tokenizer_path: Path) -> None:
    report = prepared(jsonl, tmp_path / "out", tokenizer_path, eod_token="none")
    assert report.manifest.eod_id is None
    assert all(0 not in row for row in read_ids(tmp_path / "out"))


@pytest.mark.parametrize("unit_bytes", [100, 1 << 20])
def test_max_tokens_ends_with_the_document_that_reaches_it(
    jsonl: Path, tmp_path: Path, tokenizer_path: Path, unit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_module, "UNIT_BYTES", unit_bytes)
    lines = jsonl.read_text().splitlines(keepends=True)
    jsonl.write_text("".join([*lines[:2], '{"text": ""}\n', *lines[2:6], "not json\n"]))
    lengths = [len(row) for row in read_ids(prepared_folder(jsonl, tmp_path / "all", tokenizer_path))]
    limit = sum(lengths[:3]) - 1
    report = prepared(jsonl, tmp_path / "some", tokenizer_path, max_tokens=limit)
    counts = report.manifest.counts
    assert report.manifest.tokens == limit + 1
    assert (counts["documents_in"], counts["documents_out"], counts["empty"]) == (4, 3, 1)


def prepared_folder(jsonl: Path, out: Path, tokenizer: Path) -> Path:
    prepared(jsonl, out, tokenizer, on_error="skip")
    return out


def test_training_reads_the_input_up_to_its_stated_limit(
    jsonl: Path, tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TRAIN_BYTES == 32 << 20
    monkeypatch.setattr(tokenizer_module, "TRAIN_BYTES", len(texts[0].encode()) + 1)
    prepared(jsonl, tmp_path / "out", "train:300")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == train_tokenizer(texts[:2], 300)


def test_a_finished_set_is_refused_and_its_tokenizer_compared(
    jsonl: Path, tmp_path: Path, texts: list[str], tokenizer_path: Path
) -> None:
    out = tmp_path / "out"
    prepared(jsonl, out, tokenizer_path)
    before = contents(out)
    other = tmp_path / "other.json"
    other.write_bytes(train_tokenizer(texts[5:], 400))
    for tokenizer, message in (
        (tokenizer_path, "made with the same tokenizer"),
        (other, "made with another tokenizer"),
        ("train:300", "finished shard set of"),
    ):
        with pytest.raises(FileExistsError, match=rf"{out} already holds.*{message}"):
            prepared(jsonl, out, tokenizer)
    assert contents(out) == before


def test_leftovers_of_an_unfinished_run_are_cleared(jsonl: Path, tmp_path: Path, tokenizer_path: Path) -> None:
    clean, dirty = tmp_path / "clean", tmp_path / "dirty"
    prepared(jsonl, clean, tokenizer_path)
    dirty.mkdir()
    for name in ("shard-00007.arrow", "shard-00008.arrow.tmp", "tokenizer.json", "quarantine.jsonl.tmp"):
        (dirty / name).write_bytes(b"old")
    said: list[str] = []
    options = PrepareOptions(inputs=(str(jsonl),), out=dirty, tokenizer=str(tokenizer_path))
    prepare(options, say=said.append)
    assert "4 files of an unfinished run: starting over" in said[0]
    assert contents(dirty) == contents(clean)


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json"])
def test_a_folder_with_other_files_is_refused_and_kept(
    jsonl: Path, tmp_path: Path, tokenizer_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(FileExistsError, match=rf"holds other files \({name}\)"):
        prepared(jsonl, out, tokenizer_path)
    assert contents(out) == {name: b"mine"}


def test_an_output_that_cannot_be_a_folder_is_refused(jsonl: Path, tokenizer_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="is a file"):
        prepared(jsonl, jsonl, tokenizer_path)
    with pytest.raises(OSError, match=str(jsonl)):
        prepared(jsonl, jsonl / "below", tokenizer_path)


def test_a_reserved_token_that_text_can_reach_is_refused(tmp_path: Path, tokenizer_path: Path) -> None:
    # A unigram model holds its special tokens as ordinary pieces.
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0], ["b", -1.0]]}
    special = json.loads(tokenizer_path.read_bytes())["added_tokens"][0]
    added = [{**special, "id": 0, "content": "<unk>"}, {**special, "id": 1, "content": "</s>"}]
    config = {"version": "1.0", "added_tokens": added, "model": model}
    (tmp_path / "unigram.json").write_text(json.dumps(config))
    (tmp_path / "in.jsonl").write_text('{"text": "ab?"}\n')
    prepared(tmp_path / "in.jsonl", tmp_path / "fine", tmp_path / "unigram.json")
    assert read_ids(tmp_path / "fine") == [[2, 3, 0, 1]]
    (tmp_path / "in.jsonl").write_text('{"text": "ab"}\n{"text": "a</s>b", "id": "sly"}\n')
    with pytest.raises(ValueError, match="document 'sly' encodes to the special token '</s>'"):
        prepared(tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "unigram.json")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_the_command_prints_engine_progress_and_a_table(jsonl: Path, tmp_path: Path, tokenizer_path: Path) -> None:
    for terminal in (False, True):
        output = io.StringIO()
        console = Console(file=output, force_terminal=terminal, width=100)
        run(
            PrepareOptions(inputs=(str(jsonl),), out=tmp_path / f"out{terminal}", tokenizer=str(tokenizer_path)),
            console=console,
        )
        printed = output.getvalue()
        assert re.search(r"engine: (quicktok|tiktoken) \(gave the ids of tokenizers on", printed)
        assert "documents kept" in printed
        assert ("\x1b[" in printed) == terminal


def test_progress_reaches_the_end(jsonl: Path, tmp_path: Path, tokenizer_path: Path) -> None:
    updates: list[Progress] = []
    options = PrepareOptions(inputs=(str(jsonl),), out=tmp_path / "out", tokenizer=str(tokenizer_path))
    report = prepare(options, progress=updates.append)
    assert updates[-1].fraction == 1.0
    assert updates[-1].tokens == report.manifest.tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": ()}, "no inputs"),
        ({"engine": "quick"}, "engine is 'quick'"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tokenizer": "train:5"}, "at least 257"),
    ],
)
def test_unfit_options_are_refused(fields: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"inputs": ("in.jsonl",), "out": Path("out"), "tokenizer": "train:300"}
    with pytest.raises(ValueError, match=message):
        PrepareOptions(**{**options, **fields})
