"""Filters: who stays does not depend on how the work is cut, everybody is counted, and a resumed run agrees."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seqmesh.loader.manifest import Manifest, read_manifest
from seqmesh.tools.claim import is_finished
from seqmesh.tools.journal import JOURNAL_NAME
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.units import cut
from seqmesh.tools.units.filters import Filters, drawn
from seqmesh.tools.units.seen import SEEN_NAME, Seen
from seqmesh.tools.verify import verify_set


class KilledError(BaseException):
    """Stands for a kill. Nothing catches it."""


@pytest.fixture
def texts_given() -> list[str]:
    """Of each text several, some empty, of many lengths."""
    rng = random.Random(2)
    pool = [" ".join(str(rng.randrange(10)) for _ in range(rng.randrange(60))) for _ in range(80)]
    return [rng.choice([*pool, ""]) for _ in range(300)]


@pytest.fixture
def source(tmp_path: Path, texts_given: list[str]) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_given) + "not json\n")
    return path


def made(source: Path, out: Path, tokenizer: Path, **options: Any) -> Manifest:
    given = PrepareOptions(inputs=(str(source),), out=out, tokenizer=str(tokenizer), on_error="skip", **options)
    return prepare(given).manifest


def documents(folder: Path) -> list[tuple[str, int]]:
    """Name and length of every document."""
    tables = [pa.ipc.open_file(str(folder / shard.file)).read_all() for shard in read_manifest(folder).shards]
    return [
        (str(name), len(ids or ()))
        for table in tables
        for name, ids in zip(table["doc_id"].to_pylist(), table["input_ids"].to_pylist(), strict=True)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_first_of_equal_texts_and_lengths_within_the_limits_are_kept(
    source: Path, tmp_path: Path, tokenizer_path: Path, texts_given: list[str]
) -> None:
    everything = made(source, tmp_path / "all", tokenizer_path)
    lengths = dict(documents(tmp_path / "all"))
    manifest = made(source, tmp_path / "some", tokenizer_path, min_tokens=20, max_document_tokens=90, dedup=True)
    named = {f"in.jsonl:{number}": text for number, text in enumerate(texts_given, 1)}
    within = {name: text for name, text in named.items() if 20 <= lengths.get(name, 0) <= 90}
    firsts = {text: name for name, text in reversed(within.items())}
    kept = [name for name, text in within.items() if firsts[text] == name]
    assert documents(tmp_path / "some") == [(name, lengths[name]) for name in kept]
    counts = manifest.counts
    assert counts["too_short"] == sum(length < 20 for length in lengths.values()) > 5
    assert counts["too_long"] == sum(length > 90 for length in lengths.values()) > 5
    assert counts["duplicate"] == len(within) - len(kept) > 5
    assert counts["empty"] == everything.counts["empty"] == texts_given.count("") > 0
    names = ("documents_out", "empty", "refused", "too_short", "too_long", "duplicate")
    assert counts["documents_in"] == sum(counts[name] for name in names) == len(texts_given) + 1
    assert not verify_set(tmp_path / "some")


@pytest.mark.parametrize("unit_bytes", [60, 777, 1 << 20])
def test_a_sample_is_the_same_however_the_input_is_cut(
    source: Path, tmp_path: Path, tokenizer_path: Path, unit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(source, tmp_path / "whole", tokenizer_path, sample=0.3, dedup=True)
    monkeypatch.setattr(cut, "UNIT_BYTES", unit_bytes)
    made(source, tmp_path / "cut", tokenizer_path, sample=0.3, dedup=True)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    other = made(source, tmp_path / "other", tokenizer_path, sample=0.3, dedup=True, seed=1)
    assert documents(tmp_path / "other") != documents(tmp_path / "whole")
    assert 180 < whole.counts["sampled_out"] < 240
    assert other.counts["sampled_out"] != whole.counts["sampled_out"] or other.shards != whole.shards


def test_a_sample_has_its_share_of_every_file() -> None:
    keys = np.arange(200_000) * 137
    for share in (0.01, 0.5, 0.99):
        inside = drawn(["a"] * 100_000 + ["b"] * 100_000, keys % (1 << 24), Filters(sample=share, seed=4))
        parts = inside.reshape(2, 10, 10_000).mean(2)
        assert np.abs(parts - share).max() < 5 * (share * (1 - share) / 10_000) ** 0.5
    first, second = (drawn([name] * 10_000, keys[:10_000], Filters(sample=0.5)) for name in "ab")
    assert 0.45 < (first == second).mean() < 0.55
    assert drawn(["a"] * 5, keys[:5], Filters(sample=1.0)).all()


def test_seen_knows_each_text_once() -> None:
    rng = random.Random(1)
    given = [bytes([rng.randrange(30)]) * 16 for _ in range(500)]
    seen, counted = Seen(given[0] + given[1]), Counter(given[:2])
    for at in range(0, 500, 50):
        new = seen.new(b"".join(given[at : at + 50]))
        for value, fresh in zip(given[at : at + 50], new.tolist(), strict=True):
            assert fresh == (counted[value] == 0)
            counted[value] += 1


def test_killed_at_any_moment_the_filters_agree_with_a_run_in_one_piece(
    source: Path, tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 900)
    options = {"dedup": True, "sample": 0.8, "min_tokens": 5, "max_document_tokens": 100, "shard_tokens": 500}
    made(source, tmp_path / "whole", tokenizer_path, **options)
    expected = contents(tmp_path / "whole")
    assert len([name for name in expected if name.startswith("shard")]) > 4
    for call in range(1, 100, 2):
        out = tmp_path / f"out{call}"
        if not killed(call, monkeypatch, source, out, tokenizer_path, options):
            break
        if not is_finished(out):
            made(source, out, tokenizer_path, **options)
        assert contents(out) == expected, call
    assert call > 20


def killed(
    calls: int, monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, tokenizer: Path, options: dict[str, Any]
) -> bool:
    """Run until so many syncs to the disk are done. Returns whether it came to that."""

    def fsync(_: int) -> None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        try:
            made(source, out, tokenizer, **options)
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_lost_hashes_cost_their_shards_and_what_follows(
    source: Path, tmp_path: Path, tokenizer_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dedup": True, "shard_tokens": 500}
    made(source, tmp_path / "whole", tokenizer_path, **options)
    assert killed(22, monkeypatch, source, tmp_path / "out", tokenizer_path, options)
    path = tmp_path / "out" / SEEN_NAME
    marks = [json.loads(line) for line in (tmp_path / "out" / JOURNAL_NAME).read_bytes().splitlines()[1:]]
    assert len(marks) > 2
    data = bytearray(path.read_bytes())
    data[16 * marks[0]["shard"]["rows"]] ^= 1  # the first of the second shard
    path.unlink()
    if damage != "remove":
        path.write_bytes(data if damage == "flip" else data[: 16 * marks[0]["shard"]["rows"] + 3])
    said: list[str] = []
    given = PrepareOptions(
        inputs=(str(source),), out=tmp_path / "out", tokenizer=str(tokenizer_path), on_error="skip", **options
    )
    prepare(given, say=said.append)
    again = "shard-00000.arrow" if damage == "remove" else "shard-00001.arrow"
    assert f"{SEEN_NAME} is damaged: making {again} and what follows again" in said
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_other_filters_are_refused_by_name(
    source: Path, tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dedup": True, "sample": 0.8, "shard_tokens": 500}
    assert killed(22, monkeypatch, source, tmp_path / "out", tokenizer_path, options)
    given = PrepareOptions(
        inputs=(str(source),), out=tmp_path / "out", tokenizer=str(tokenizer_path), on_error="skip", **options
    )
    for changes, message in (
        ({"dedup": False}, "dedup was True, now False"),
        ({"sample": 0.5}, "sample was 0.8, now 0.5"),
        ({"seed": 3}, "seed was 0, now 3"),
        (
            {"min_tokens": 2, "max_document_tokens": 9},
            "min_tokens was None, now 2; max_document_tokens was None, now 9",
        ),
    ):
        with pytest.raises(ValueError, match=f"made differently: {message}"):
            prepare(replace(given, **changes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 0}, "min_tokens is 0: must be at least 1"),
        ({"max_document_tokens": 0}, "max_document_tokens is 0: must be at least 1"),
        ({"min_tokens": 9, "max_document_tokens": 8}, "min_tokens is 9, max_document_tokens 8: nothing is left"),
        ({"sample": 0.0}, r"sample is 0\.0: must be a share above 0, at most 1"),
        ({"sample": 1.5}, r"sample is 1\.5"),
        ({"workers": 0}, "workers is 0: must be at least 1"),
    ],
)
def test_unfit_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrepareOptions(inputs=("in.jsonl",), out=Path("out"), tokenizer="train:300", **fields)


def test_a_compressed_file_is_filtered_like_a_plain_one_of_its_name(
    source: Path, tmp_path: Path, tokenizer_path: Path
) -> None:
    (tmp_path / "packed").mkdir()
    packed = tmp_path / "packed" / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    counts = made(packed, tmp_path / "out", tokenizer_path, dedup=True, min_tokens=20).counts
    assert counts == made(source, tmp_path / "plain", tokenizer_path, dedup=True, min_tokens=20).counts
