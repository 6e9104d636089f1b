"""prepare --shuffle-seed: every shard holds the same documents, with all that belongs to them, in a drawn order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seqmesh.loader.manifest import LENGTHS_NAME, read_manifest
from seqmesh.packer.permute import permutation, shuffle_key
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.prepare_report import Progress
from seqmesh.tools.shard_writer import ShardWriter
from seqmesh.tools.units import cut
from seqmesh.tools.verify import verify_set

SHARD_TOKENS = 900


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    pieces = [text[:400] for text in texts]
    lines = [
        {"text": text, "id": f"d{number}", "source": f"s{number % 3}", "n": number}
        for number, text in enumerate([*pieces, *pieces[:9], "", " "])
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options_for(corpus: Path, out: Path, tokenizer: Path, **changes: Any) -> PrepareOptions:
    defaults: dict[str, Any] = {"shard_tokens": SHARD_TOKENS, "keep": ("n",), "dedup": True, "shuffle_seed": 7}
    return PrepareOptions(inputs=(str(corpus),), out=out, tokenizer=str(tokenizer), **defaults | changes)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shards_of(folder: Path) -> list[list[dict[str, Any]]]:
    return [pa.ipc.open_file(str(folder / shard.file)).read_all().to_pylist() for shard in read_manifest(folder).shards]


def lengths_of(folder: Path) -> list[dict[str, int]]:
    return pa.ipc.open_file(str(folder / LENGTHS_NAME)).read_all().to_pylist()


def test_each_shard_holds_its_documents_in_the_drawn_order(corpus: Path, tmp_path: Path, tokenizer_path: Path) -> None:
    for name, seed in (("plain", None), ("drawn", 7), ("other", 8)):
        prepare(options_for(corpus, tmp_path / name, tokenizer_path, shuffle_seed=seed))
        assert verify_set(tmp_path / name) == []
    plain, drawn, other = (shards_of(tmp_path / name) for name in ("plain", "drawn", "other"))
    assert len(plain) > 4
    for number, (before, after) in enumerate(zip(plain, drawn, strict=True)):
        order = permutation(len(before), shuffle_key(7, number)).tolist()
        assert after == [before[document] for document in order]
    assert plain != drawn != other
    index = lengths_of(tmp_path / "drawn")
    assert [len(row["input_ids"]) for rows in drawn for row in rows] == [entry["length"] for entry in index]
    assert [row["source"] for rows in drawn for row in rows] == [entry["source"] for entry in index]


def test_neither_kills_nor_workers_change_the_order(
    corpus: Path, tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 3000)
    whole, resumed = (options_for(corpus, tmp_path / name, tokenizer_path) for name in ("whole", "resumed"))
    prepare(whole)

    def interrupt(progress: Progress) -> None:
        if progress.tokens - progress.resumed_tokens > 2 * SHARD_TOKENS:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(resumed, progress=interrupt)
    assert prepare(resumed).resumed_tokens > 2 * SHARD_TOKENS
    assert contents(resumed.out) == contents(whole.out)
    prepare(options_for(corpus, tmp_path / "two", tokenizer_path, workers=2))
    assert contents(tmp_path / "two") == contents(whole.out)


def test_targets_and_supervised_tokens_go_along(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, 30, 60)
    targets = [None if n % 3 == 0 else [[0, int(length) // 2]] for n, length in enumerate(lengths)]
    writer = ShardWriter(tmp_path / "set", vocab_size=500, tokenizer="t", eod_id=None, shard_tokens=200, shuffle_seed=3)
    with writer:
        writer.add(
            np.repeat(np.arange(60), lengths),
            lengths=lengths,
            doc_ids=[str(n) for n in range(60)],
            sources=["all"] * 60,
            targets=targets,
        )
    assert verify_set(tmp_path / "set") == []
    rows = [row for shard in shards_of(tmp_path / "set") for row in shard]
    assert sorted(int(row["doc_id"]) for row in rows) == list(range(60))
    for row, entry in zip(rows, lengths_of(tmp_path / "set"), strict=True):
        number, length = int(row["doc_id"]), len(row["input_ids"])
        given = targets[number]
        assert row["input_ids"] == [number] * int(lengths[number])
        assert row["targets"] == (None if given is None else given[0])
        assert entry["supervised"] == (length - 1 if given is None else max(length // 2 - 1, 0))


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_that_is_none_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"shuffle_seed is {seed}: must be from 0"):
        PrepareOptions(inputs=("x",), out=Path("y"), tokenizer="z", shuffle_seed=seed)
