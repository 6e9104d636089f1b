"""The command prepare on conversations, kept columns and standard input: whole, resumed, by several workers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from seqmesh.loader.manifest import read_manifest
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.prepare_report import PrepareReport, Progress
from seqmesh.tools.tokenizers.file import load_tokenizer
from seqmesh.tools.tokenizers.training import train_tokenizer
from seqmesh.tools.units import cut
from seqmesh.tools.verify import verify_set


@pytest.fixture(scope="module")
def chat_tokenizer(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    trained = Tokenizer.from_str(train_tokenizer(texts, 400).decode())
    trained.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(trained.to_str())
    return path


@pytest.fixture
def talks(tmp_path: Path, texts: list[str]) -> Path:
    rows = [
        {
            "chat": [{"role": "user", "content": f"{number} <|im_end|>"}, {"role": "assistant", "content": text}],
            "n": number,
        }
        for number, text in enumerate(texts)
    ]
    rows[3:3] = [{"chat": []}, {"chat": [{"role": "user"}]}, {"chat": [{"role": "user", "content": " "}]}]
    rows[9:9] = [{"chat": [{"role": "user", "content": "\ufdd0"}]}]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(inputs: str | Path, out: Path, tokenizer: Path, **options: Any) -> PrepareReport:
    progress = options.pop("progress", lambda _: None)
    return prepare(
        PrepareOptions(inputs=(str(inputs),), out=out, tokenizer=str(tokenizer), **options), progress=progress
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    shards = (pa.ipc.open_file(str(folder / shard.file)).read_all() for shard in read_manifest(folder).shards)
    return [row for table in shards for row in table.to_pylist()]


def interrupt(progress: Progress) -> None:
    if progress.tokens > 9000:
        raise KeyboardInterrupt


ASSISTANT = "assistant"
JINJA = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
)


def test_conversations_become_documents_with_targets(
    talks: Path, tmp_path: Path, texts: list[str], chat_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 1500)
    options: dict[str, Any] = {"chat_column": "chat", "keep": ("n",), "on_error": "skip", "shard_tokens": 1000}
    report = prepared(talks, tmp_path / "out", chat_tokenizer, **options)
    file = load_tokenizer(chat_tokenizer)
    rows = rows_of(tmp_path / "out")
    (silent,) = (row for row in rows if not row["targets"])
    assert (silent["doc_id"], silent["metadata"]) == ("talks.jsonl:10", "{}")
    spoken = [row for row in rows if row["targets"]]
    said = [
        file.tokenizer.decode(row["input_ids"][slice(*row["targets"])], skip_special_tokens=False) for row in spoken
    ]
    assert said == [text + "<|im_end|>" for text in texts]
    assert [json.loads(row["metadata"]) for row in spoken] == [{"n": number} for number in range(len(texts))]
    assert all(row["input_ids"].count(file.eod_id) == 1 for row in rows)
    counts = report.manifest.counts
    assert (counts["documents_in"], counts["empty"], counts["refused"]) == (len(texts) + 4, 2, 1)
    refused = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in refused] == [5]
    assert "no conversation: message 0 has no content that is a string" in refused[0]["reason"]
    assert verify_set(tmp_path / "out") == []
    (tmp_path / "talk.jinja").write_text(JINJA)
    other = {**options, "chat_template": str(tmp_path / "talk.jinja")}
    with pytest.raises(KeyboardInterrupt):
        prepared(talks, tmp_path / "resumed", chat_tokenizer, progress=interrupt, **options)
    with pytest.raises(ValueError, match=r"chat_template was [0-9a-f]{32}, now"):
        prepared(talks, tmp_path / "resumed", chat_tokenizer, **other)
    prepared(talks, tmp_path / "resumed", chat_tokenizer, **options)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "out")
    prepared(talks, tmp_path / "two", chat_tokenizer, workers=2, **other)
    assert rows_of(tmp_path / "two") == spoken
    refused = [json.loads(line) for line in (tmp_path / "two" / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in refused] == [5, 10]
    assert "U+FDD0" in refused[1]["reason"] and r"\ufdd0" in refused[1]["raw"]


def test_standard_input_is_continued_where_the_same_is_given(
    tmp_path: Path, texts: list[str], tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 1500)
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()

    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))

    give(data)
    prepared("-", tmp_path / "out", tokenizer_path, shard_tokens=1000)
    give(data)
    with pytest.raises(KeyboardInterrupt):
        prepared("-", tmp_path / "cut", tokenizer_path, shard_tokens=1000, progress=interrupt)
    give(data + b"\n")
    with pytest.raises(ValueError, match="input stdin had"):
        prepared("-", tmp_path / "cut", tokenizer_path, shard_tokens=1000)
    give(data)
    prepared("-", tmp_path / "cut", tokenizer_path, shard_tokens=1000)
    assert contents(tmp_path / "cut") == contents(tmp_path / "out")
    assert len(rows_of(tmp_path / "out")) == len(texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "out"]


def test_arrow_and_jsonl_of_the_same_documents_give_the_same_set(
    tmp_path: Path, texts: list[str], tokenizer_path: Path
) -> None:
    names = [f"d{number}" for number in range(len(texts))]
    table = pa.table({"text": texts, "id": names})
    with pa.ipc.new_stream(str(tmp_path / "in.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    lines = (json.dumps({"text": text, "id": name}) + "\n" for text, name in zip(texts, names, strict=True))
    (tmp_path / "in.jsonl").write_text("".join(lines))
    prepared(tmp_path / "in.arrow", tmp_path / "a", tokenizer_path)
    prepared(tmp_path / "in.jsonl", tmp_path / "b", tokenizer_path)
    assert read_manifest(tmp_path / "a") == read_manifest(tmp_path / "b")
