"""The command inspect: exact numbers, and files that are not what the manifest says are named."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from seqmesh.tools.inspect_set import inspect_set, length_histogram, length_percentiles, run
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.shard_writer import write_shards


def printed(folder: Path, show: int | None = None) -> str:
    output = io.StringIO()
    run(folder=folder, show=show, console=Console(file=output, width=100))
    return output.getvalue()


def test_the_summary_counts_by_source_and_length(tmp_path: Path) -> None:
    lengths = [1, 2, 3, 4, 5000, 40_000]
    sources = ["web", "web", "code", "web", "code", "web"]
    write_shards(tmp_path, [np.ones(n, np.int64) for n in lengths], sources=sources, shard_tokens=6000)
    summary = inspect_set(tmp_path)
    assert summary.source_documents == {"web": 4, "code": 2}
    assert summary.source_tokens == {"web": 40_007, "code": 5003}
    assert summary.percentiles[50] == 3
    assert summary.percentiles[100] == 40_000
    assert summary.long_share == {4096: 45_000 / 45_010, 32768: 40_000 / 45_010, 131072: 0.0}
    output = printed(tmp_path)
    for expected in ("45,010", "32,768+", "88.9%", "tokens in documents above 4K", "uint16"):
        assert expected in output


@given(st.lists(st.integers(1, 1 << 40), min_size=1))
def test_every_document_is_in_the_bucket_of_its_length(lengths: list[int]) -> None:
    buckets = length_histogram(np.array(lengths, np.int64))
    for bucket in buckets:
        inside = [length for length in lengths if bucket.low <= length <= bucket.high]
        assert (bucket.documents, bucket.tokens) == (len(inside), sum(inside))
    assert sum(bucket.documents for bucket in buckets) == len(lengths)
    assert set(length_percentiles(np.array(lengths, np.int64)).values()) <= set(lengths)


def test_a_set_without_documents_can_be_inspected(tmp_path: Path) -> None:
    write_shards(tmp_path, [])
    assert inspect_set(tmp_path).histogram == ()
    assert "documents" in printed(tmp_path)


def test_missing_and_cut_and_damaged_files_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [[1, 2], [3, 4]], shard_tokens=2)
    shard = tmp_path / "shard-00001.arrow"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with pytest.raises(ValueError, match=rf"shard-00001\.arrow is cut short: {len(data) - 10} bytes"):
        inspect_set(tmp_path)
    shard.write_bytes(bytes(len(data)))
    with pytest.raises(ValueError, match=r"shard-00001\.arrow is damaged"):
        inspect_set(tmp_path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00001\.arrow is missing"):
        inspect_set(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a finished shard set"):
        inspect_set(tmp_path / "nowhere")


def test_one_document_is_shown_as_text_and_cannot_steer_the_terminal(tmp_path: Path, tokenizer_path: Path) -> None:
    texts = ["first [bold]text[/bold]", "second\x1b[31m\x07 document\n\twith lines", "third"]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text, "id": text[:5]}) + "\n" for text in texts))
    out = tmp_path / "out"
    prepare(PrepareOptions(inputs=(str(source),), out=out, tokenizer=str(tokenizer_path), shard_tokens=20))
    assert texts[0] in printed(out, show=0)
    assert "document 1: secon, source in" in printed(out, show=1)
    assert "second␛[31m␇ document\n" in printed(out, show=1)
    assert "third" in printed(out, show=2)
    with pytest.raises(ValueError, match="no document 3: it holds 3"):
        printed(out, show=3)


def test_documents_are_shown_only_by_the_tokenizer_they_were_made_with(tmp_path: Path, tokenizer_path: Path) -> None:
    write_shards(tmp_path, [[1, 2]], tokenizer="another")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        printed(tmp_path, show=0)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    with pytest.raises(ValueError, match="is not the tokenizer of this set"):
        printed(tmp_path, show=0)
