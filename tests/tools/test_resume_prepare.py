"""An interrupted `prepare` goes on after its last finished shard and ends with the bytes of a run in one piece."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqmesh.loader.manifest import MANIFEST_NAME, read_manifest
from seqmesh.tools import journal
from seqmesh.tools.claim import LOCK_NAME, is_finished
from seqmesh.tools.journal import JOURNAL_NAME
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.prepare_report import Progress
from seqmesh.tools.preparing import tokenizer as tokenizer_module
from seqmesh.tools.tokenizers.training import train_tokenizer
from seqmesh.tools.units import cut as cut_module

SHARD_TOKENS = 1500


class KilledError(BaseException):
    """Stands for a kill. Nothing catches it."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards end inside batches as well as between them."""
    monkeypatch.setattr(cut_module, "UNIT_BYTES", 3000)
    monkeypatch.setattr(cut_module, "UNIT_RECORDS", 5)


@pytest.fixture(scope="session")
def pieces(texts: list[str]) -> list[str]:
    """Enough short documents for half a dozen shards."""
    return ["\n".join(texts)[at : at + 500 + at % 300] for at in range(0, 27_000, 600)]


@pytest.fixture
def inputs(tmp_path: Path, pieces: list[str]) -> dict[str, list[str]]:
    """The same kinds of trouble in every kind of input: empty and bad records, several sources, several files."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    lines = []
    for number, text in enumerate(pieces):
        lines.append(json.dumps({"text": text, "source": f"s{9 - number // 7}"}) + "\n")
        lines.extend({2: ['{"text": ""}\n'], 3: ["not json\n"], 4: ["\n", '{"text": 5}\n']}.get(number % 6, []))
    data = "".join(lines).encode()
    (folder / "one.jsonl").write_bytes(data)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(data))
    table = pa.table({"text": [None if number % 6 == 2 else text for number, text in enumerate(pieces)]})
    pq.write_table(table, folder / "rows.parquet", row_group_size=9)
    (folder / "files").mkdir()
    for number, text in enumerate(pieces):
        (folder / "files" / f"{number:03d}.txt").write_bytes(b"\xff" if number % 9 == 4 else text.encode())
    names = {"lines": ["one.jsonl"], "packed": ["packed.jsonl.gz"], "rows": ["rows.parquet"], "files": ["files"]}
    names["several"] = ["rows.parquet", "one.jsonl"]
    return {kind: [str(folder / name) for name in given] for kind, given in names.items()}


def options_for(given: list[str], out: Path, tokenizer: Path | str, **changes: Any) -> PrepareOptions:
    defaults: dict[str, Any] = {"shard_tokens": SHARD_TOKENS, "on_error": "skip"}
    return PrepareOptions(inputs=tuple(given), out=out, tokenizer=str(tokenizer), **defaults | changes)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shard_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Which file each shard is: a file that is made again has another inode or time."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.arrow")}


def killed_at(call: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Run `work`, killed instead of its `call`-th sync to the disk. Returns whether it came to that."""
    calls = 0

    def fsync(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > call:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        try:
            work()
        except KilledError:
            return True
    return False


def interrupted(options: PrepareOptions, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until that many shards are in the journal."""
    original = journal.append

    def append(folder: Path, mark: Any) -> None:
        original(folder, mark)
        if len((folder / JOURNAL_NAME).read_bytes().splitlines()) > shards:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(journal, "append", append)
        with pytest.raises(KilledError):
            prepare(options)
    assert len(shard_files(options.out)) == shards


@pytest.mark.parametrize("kind", ["lines", "packed", "rows", "files", "several"])
def test_killed_at_any_moment_it_ends_with_the_same_bytes_and_redoes_one_shard_at_most(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = options_for(inputs[kind], tmp_path / "whole", tokenizer_path)
    report = prepare(whole)
    expected = contents(whole.out)
    assert len(report.manifest.shards) > 4
    assert report.manifest.counts["refused"] > 3
    call = 0
    while True:
        options = options_for(inputs[kind], tmp_path / f"out{call}", tokenizer_path)
        if not killed_at(call, monkeypatch, partial(prepare, options)):
            break
        before = shard_files(options.out)
        if not is_finished(options.out):
            again = prepare(options)
            assert again.left_out == report.left_out
        after = shard_files(options.out)
        redone = [name for name in before if name.startswith("shard") and before[name] != after[name]]
        assert len(redone) <= 1, call
        assert contents(options.out) == expected, call
        shutil.rmtree(options.out)
        # A shard syncs four times. Every moment is tried with one kind of input, with the others a different one of
        # the four at each shard.
        call += 1 if kind == "lines" else 3
    assert call > 24  # there were that many moments to be killed in


def test_killed_again_and_again_it_still_gets_there(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, options = (options_for(inputs["several"], tmp_path / name, tokenizer_path) for name in ("whole", "out"))
    prepare(whole)
    runs = 0
    while not is_finished(options.out):
        # A start syncs some files of its own; so many calls are enough for one shard more.
        killed_at(12, monkeypatch, partial(prepare, options))
        runs += 1
    assert runs > 3
    assert contents(options.out) == contents(whole.out)


def test_what_is_kept_is_said_and_counted(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(inputs["lines"], tmp_path / "out", tokenizer_path)
    interrupted(options, 3, monkeypatch)
    said: list[str] = []
    updates: list[Progress] = []
    report = prepare(options, say=said.append, progress=updates.append)
    kept = sum(shard.tokens for shard in report.manifest.shards[:3])
    assert f"continuing after 3 shards of {kept:,} tokens, at {inputs['lines'][0]}, line " in said[1]
    assert report.resumed_tokens == kept
    assert {update.resumed_tokens for update in updates} == {kept}
    assert updates[0].tokens > kept


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_shard_is_made_again_with_all_that_follow(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, options = (options_for(inputs["lines"], tmp_path / name, tokenizer_path) for name in ("whole", "out"))
    prepare(whole)
    interrupted(options, 4, monkeypatch)
    path = options.out / "shard-00002.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes(data if damage == "flip" else data[:-1])
    before = shard_files(options.out)
    said: list[str] = []
    prepare(options, say=said.append)
    assert "shard-00002.arrow is missing or damaged: making it and what follows again" in said
    after = shard_files(options.out)
    names = ("shard-00000.arrow", "shard-00001.arrow", "shard-00003.arrow")
    assert [before[name] == after[name] for name in names] == [True, True, False]
    assert contents(options.out) == contents(whole.out)


def test_half_a_line_in_the_journal_and_a_short_quarantine_cost_their_shards_only(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = options_for(inputs["lines"], tmp_path / "whole", tokenizer_path)
    prepare(whole)
    for name, kept in ((JOURNAL_NAME, 3), ("quarantine.jsonl.tmp", 1)):
        options = options_for(inputs["lines"], tmp_path / name, tokenizer_path)
        interrupted(options, 4, monkeypatch)
        path = options.out / name
        marks = [json.loads(line) for line in (options.out / JOURNAL_NAME).read_bytes().splitlines()[1:]]
        assert marks[0]["quarantine"] < marks[1]["quarantine"]
        path.write_bytes(path.read_bytes()[: -20 if name == JOURNAL_NAME else marks[1]["quarantine"] - 1])
        before = shard_files(options.out)
        prepare(options)
        after = shard_files(options.out)
        assert [before[shard] == after[shard] for shard in sorted(before)] == [n < kept for n in range(4)]
        assert contents(options.out) == contents(whole.out)


def test_what_differs_is_named_and_nothing_is_mixed(
    inputs: dict[str, list[str]],
    tmp_path: Path,
    texts: list[str],
    tokenizer_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(train_tokenizer(texts[5:], 400))
    lines = inputs["lines"]
    options = options_for(lines, tmp_path / "out", tokenizer_path)
    interrupted(options, 2, monkeypatch)
    before = contents(options.out)
    for changes, message in (
        ({"tokenizer": str(other)}, r"differently: tokenizer was \w{32}, now \w{32}\. Give"),
        ({"tokenizer": "train:400"}, r"differently: tokenizer was \w{32}, now train:400\."),
        ({"eod_token": "none"}, r"differently: eod_token was <\|endoftext\|>, now None\."),
        ({"bod_token": "<|endoftext|>"}, r"differently: bod_token was None, now <\|endoftext\|>\."),
        ({"parse_special": True}, r"differently: parse_special was False, now True\."),
        ({"shard_tokens": 1501}, r"differently: shard_tokens was 1500, now 1501\."),
        ({"shuffle_seed": 0}, r"differently: shuffle_seed was None, now 0\."),
        ({"longest_record": 9000}, r"differently: longest_record was 268435456, now 9000\."),
        ({"max_tokens": 9, "text_column": "t"}, "max_tokens was None, now 9; text_column was text, now t"),
        ({"inputs": (*lines, inputs["rows"][0])}, r"differently: input rows\.parquet is new\."),
        ({"inputs": tuple(inputs["rows"])}, r"input one\.jsonl is gone; input rows\.parquet is new\."),
        ({"on_error": "stop"}, r"on_error was skip, which put \d+ bad records into quarantine, now stop"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(replace(options, **changes))
        assert contents(options.out) == before
    assert prepare(options).manifest.counts["refused"] > 0


def test_inputs_that_changed_since_are_named(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(inputs["several"], tmp_path / "out", tokenizer_path)
    interrupted(options, 2, monkeypatch)
    with pytest.raises(ValueError, match="the inputs are in another order or folder"):
        prepare(replace(options, inputs=options.inputs[::-1]))
    path = Path(inputs["lines"][0])
    before = path.stat().st_mtime_ns
    os.utime(path, ns=(before, before + 1))
    with pytest.raises(ValueError, match=r"input one\.jsonl was written again since"):
        prepare(options)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"input one\.jsonl had \d+ bytes, now \d+"):
        prepare(options)


def test_without_a_finished_shard_changes_are_welcome(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path
) -> None:
    """The usual case: the first bad line stops a run, is mended, and the same command is given again."""
    whole, options = (
        options_for(inputs["lines"], tmp_path / name, "train:300", on_error="stop") for name in ("whole", "out")
    )
    path = Path(inputs["lines"][0])
    good = [line for line in path.read_text().splitlines() if '"source"' in line]
    path.write_text("\n".join([*good, "not json"]))
    with pytest.raises(ValueError, match="not JSON"):
        prepare(replace(options, shard_tokens=1 << 20))
    assert JOURNAL_NAME not in contents(options.out)  # it was training the tokenizer
    with pytest.raises(ValueError, match="not JSON"):
        prepare(replace(options, tokenizer=str(tokenizer_path), shard_tokens=1 << 20))
    path.write_text("\n".join(good))
    said: list[str] = []
    prepare(options, say=said.append)
    assert "holds 2 files of an unfinished run: starting over" in said[0]
    prepare(whole)
    assert contents(options.out) == contents(whole.out)


def test_a_run_that_stops_at_a_bad_record_goes_on_once_told_to_skip(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path
) -> None:
    path = Path(inputs["lines"][0])
    good = [line for line in path.read_text().splitlines() if '"source"' in line]
    path.write_text("\n".join([*good[:-1], "not json", good[-1]]))
    whole, options = (options_for(inputs["lines"], tmp_path / name, tokenizer_path) for name in ("whole", "out"))
    prepare(whole)
    with pytest.raises(ValueError, match="Mend it, or skip"):
        prepare(replace(options, on_error="stop"))
    kept = shard_files(options.out)
    assert len(kept) > 3
    prepare(options)
    assert kept.items() <= shard_files(options.out).items()
    assert contents(options.out) == contents(whole.out)
    assert len(contents(options.out)["quarantine.jsonl"].splitlines()) == 1


def test_skipping_may_be_given_up_while_nothing_was_skipped(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(inputs["lines"][0])
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"source"' in line))
    whole, options = (
        options_for(inputs["lines"], tmp_path / name, tokenizer_path, on_error="stop") for name in ("whole", "out")
    )
    prepare(whole)
    interrupted(replace(options, on_error="skip"), 2, monkeypatch)
    assert (options.out / "quarantine.jsonl.tmp").exists()
    prepare(options)
    assert contents(options.out) == contents(whole.out)


def test_a_trained_tokenizer_is_trained_once(
    inputs: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, options = (options_for(inputs["lines"], tmp_path / name, "train:300") for name in ("whole", "out"))
    prepare(whole)
    interrupted(options, 2, monkeypatch)
    with pytest.raises(ValueError, match="tokenizer was train:300, now train:301"):
        prepare(replace(options, tokenizer="train:301"))
    with monkeypatch.context() as patch:
        patch.delattr(tokenizer_module, "train_tokenizer")
        interrupted(options, 3, monkeypatch)
    (options.out / "tokenizer.json").write_bytes(b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "train_tokenizer", lambda texts, size: train_tokenizer(list(texts)[3:], size))
        with pytest.raises(ValueError, match=r"tokenizer\.json, which the shards .* were made with, is lost"):
            prepare(options)
    prepare(options)
    assert contents(options.out) == contents(whole.out)


def test_inputs_and_output_may_move_between_runs(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = options_for(inputs["lines"], tmp_path / "whole", tokenizer_path, on_error="stop")
    path = Path(inputs["lines"][0])
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"source"' in line))
    prepare(whole)
    options = replace(whole, out=tmp_path / "out")
    interrupted(options, 2, monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(path, tmp_path / "elsewhere")
    options.out.rename(tmp_path / "moved")
    prepare(replace(options, inputs=(str(moved),), out=tmp_path / "moved"))
    assert contents(tmp_path / "moved") == contents(whole.out)


def test_the_limit_of_tokens_holds_over_runs(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 3 * SHARD_TOKENS + 700
    whole, options = (
        options_for(inputs["lines"], tmp_path / name, tokenizer_path, max_tokens=limit) for name in ("whole", "out")
    )
    prepare(whole)
    interrupted(options, 2, monkeypatch)
    prepare(options)
    assert contents(options.out) == contents(whole.out)
    assert read_manifest(options.out).tokens >= limit


def test_two_runs_never_share_a_folder(inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path) -> None:
    whole, options = (options_for(inputs["lines"], tmp_path / name, tokenizer_path) for name in ("whole", "out"))
    prepare(whole)
    refused = 0

    def second_run(_: Progress) -> None:
        nonlocal refused
        before = contents(options.out)
        with pytest.raises(BlockingIOError, match=f"another run of prepare writes to {options.out}"):
            prepare(options)
        assert contents(options.out) == before
        refused += 1

    prepare(options, progress=second_run)
    assert refused > 3
    assert contents(options.out) == contents(whole.out)


def test_a_lock_left_in_a_finished_folder_is_removed(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path
) -> None:
    options = options_for(inputs["lines"], tmp_path / "out", tokenizer_path)
    prepare(options)
    before = contents(options.out)
    (options.out / LOCK_NAME).touch()
    with pytest.raises(FileExistsError, match="already holds a finished shard set"):
        prepare(options)
    assert contents(options.out) == before


def test_a_manifest_beside_a_journal_is_not_believed(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, options = (options_for(inputs["lines"], tmp_path / name, tokenizer_path) for name in ("whole", "out"))
    prepare(whole)
    with monkeypatch.context() as patch:
        patch.delattr(journal, "remove")
        with pytest.raises(AttributeError):
            prepare(options)
    assert (options.out / MANIFEST_NAME).exists()
    before = shard_files(options.out)
    prepare(options)
    after = shard_files(options.out)
    assert sum(before[name] != after[name] for name in before if name.startswith("shard")) == 1  # the last one
    assert contents(options.out) == contents(whole.out)


@pytest.mark.parametrize("head", [b"", b"[]\n", b'{"format": 1}\n'])
def test_a_journal_of_another_version_is_refused(
    inputs: dict[str, list[str]], tmp_path: Path, tokenizer_path: Path, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(inputs["lines"], tmp_path / "out", tokenizer_path)
    interrupted(options, 2, monkeypatch)
    (options.out / JOURNAL_NAME).write_bytes(head)
    before = contents(options.out)
    with pytest.raises(ValueError, match="is not the journal of this version of seqmesh"):
        prepare(options)
    assert contents(options.out) == before
