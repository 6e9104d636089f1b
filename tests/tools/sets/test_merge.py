"""merge and append: the documents of all sets, once each, in order; nothing half-done looks finished."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest

from seqmesh.loader.errors import ShardError
from seqmesh.loader.manifest import MANIFEST_NAME, read_manifest
from seqmesh.tools.inspect_set import inspect_set
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.sets.append import append_sets
from seqmesh.tools.sets.merge import merge_sets
from seqmesh.tools.shard_writer import write_shards
from seqmesh.tools.verify import verify_set
from tests.support import forget_sources
from tests.tools.sets.sets import a_set, assert_whole, bytes_of, rows_of
from tests.warm import ran

FIRST = "shard-00000.arrow"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two sets whose sources overlap, in another order."""
    a = a_set(tmp_path / "a", 20, sources=["web", "code"] * 10)
    b = a_set(tmp_path / "b", 15, name="e", seed=1, sources=["code"] * 8 + ["books"] * 7, targets=[[(0, 1)]] * 15)
    return a, b


def test_merged_documents_are_those_of_all_sets_in_order(pair: tuple[Path, Path], tmp_path: Path) -> None:
    manifest = merge_sets(tmp_path / "out", list(map(str, pair)))
    assert rows_of(tmp_path / "out") == rows_of(pair[0]) + rows_of(pair[1])
    assert manifest.sources == ("web", "code", "books")
    assert manifest.counts == {"documents_in": 35, "documents_out": 35, "tokens_out": manifest.tokens}
    assert_whole(tmp_path / "out")
    merge_sets(tmp_path / "again", list(map(str, pair)))
    assert bytes_of(tmp_path / "again") == bytes_of(tmp_path / "out")


def test_shards_that_do_not_change_are_linked_and_others_are_not(pair: tuple[Path, Path], tmp_path: Path) -> None:
    merge_sets(tmp_path / "out", list(map(str, pair)))
    shards = read_manifest(tmp_path / "out").shards
    kept = len(read_manifest(pair[0]).shards)
    nodes = {path.stat().st_ino for each in pair for path in each.iterdir()}
    linked = [(tmp_path / "out" / shard.file).stat().st_ino in nodes for shard in shards]
    assert linked == [True] * kept + [False] * (len(shards) - kept)


def test_a_merge_is_what_prepare_makes_of_all_inputs(tmp_path: Path, texts: list[str], tokenizer_path: Path) -> None:
    """Where a shard ends between the inputs."""
    for name, part in (("a", texts[:20]), ("b", texts[20:30]), ("ab", texts[:30])):
        folder = tmp_path / name
        folder.mkdir()
        for number, text in enumerate(part, 20 if name == "b" else 0):
            (folder / f"{number:03d}.txt").write_text(text)
        prepare(_options(folder, tmp_path / f"set-{name}", tokenizer_path))
    merge_sets(tmp_path / "merged", [str(tmp_path / "set-a"), str(tmp_path / "set-b")])
    merged, whole = (rows_of(tmp_path / name) for name in ("merged", "set-ab"))
    assert [(row[0], row[2]) for row in merged] == [(row[0], row[2]) for row in whole]
    assert read_manifest(tmp_path / "merged").counts == read_manifest(tmp_path / "set-ab").counts
    assert_whole(tmp_path / "merged")


def test_a_merge_has_the_bytes_of_a_set_that_was_written_at_once(tmp_path: Path) -> None:
    documents = [[i] * 10 for i in range(12)]
    names, sources = [f"d{i}" for i in range(12)], ["x", "y", "z"] * 2 + ["z", "x", "w"] * 2
    parts = {"a": slice(0, 6), "b": slice(6, 12), "whole": slice(0, 12)}
    for name, chosen in parts.items():
        write_shards(
            tmp_path / name, documents[chosen], doc_ids=names[chosen], sources=sources[chosen], shard_tokens=30
        )
    merge_sets(tmp_path / "out", [str(tmp_path / "a"), str(tmp_path / "b")])
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "abc"}, "can not be one set: tokenizer is none in the first and abc in the other"),
        ({"vocab_size": 2000}, "can not be one set: vocab_size is 1000 in the first and 2000 in the other"),
        ({"eod_id": 5}, "can not be one set: eod_id is None in the first and 5 in the other"),
    ],
)
def test_sets_of_different_tokenizers_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    a, b = a_set(tmp_path / "a", 3), a_set(tmp_path / "b", 3, seed=1, **options)
    with pytest.raises(ValueError, match=message):
        merge_sets(tmp_path / "out", [str(a), str(b)])
    with pytest.raises(ValueError, match=message):
        append_sets(a, [str(b)])
    assert not (tmp_path / "out").exists()
    assert_whole(a)


def test_documents_do_not_come_twice_unseen(tmp_path: Path) -> None:
    a, b = a_set(tmp_path / "a", 30), a_set(tmp_path / "b", 30, seed=1, sources=["new"] * 30)
    for again in ([str(a), str(a)], [str(a), str(b), str(a)]):
        with pytest.raises(ValueError, match="would be there twice"):
            merge_sets(tmp_path / "out", again)
    append_sets(a, [str(b)])
    before = bytes_of(a)
    with pytest.raises(ValueError, match=r"b holds the documents of shard-000\d\d.arrow that .*a has already"):
        append_sets(a, [str(b)])  # rewritten for its sources, so that only the outcome tells
    assert bytes_of(a) == before


def test_sets_without_documents_add_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    write_shards(empty, [], vocab_size=1000)
    a = a_set(tmp_path / "a", 5)
    merge_sets(tmp_path / "out", [str(empty), str(a), str(empty)])
    assert rows_of(tmp_path / "out") == rows_of(a)
    assert_whole(tmp_path / "out")
    merge_sets(tmp_path / "none", [str(empty), str(empty)])
    assert rows_of(tmp_path / "none") == []
    assert_whole(tmp_path / "none")
    before = bytes_of(a)
    append_sets(a, [str(empty)])
    assert bytes_of(a) == before


def test_outputs_that_exist_or_lie_in_an_input_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there exists already"):
        merge_sets(tmp_path / "there", list(map(str, pair)))
    with pytest.raises(ValueError, match=r"lies inside .*a, which is read"):
        merge_sets(pair[0] / "out", list(map(str, pair)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "there"]


def test_a_damaged_shard_is_not_given_a_new_checksum(pair: tuple[Path, Path], tmp_path: Path) -> None:
    data = bytearray((pair[1] / FIRST).read_bytes())
    data[len(data) // 2] ^= 1
    (pair[1] / FIRST).write_bytes(data)
    with pytest.raises(ShardError, match="its checksum differs"):
        merge_sets(tmp_path / "out", list(map(str, pair)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_set_at_a_url_is_merged(pair: tuple[Path, Path], tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for folder in pair:
        system.put(str(folder), f"/merge-{folder.name}", recursive=True)
    merge_sets(tmp_path / "out", ["memory://merge-a", "memory://merge-b"])
    merge_sets(tmp_path / "local", list(map(str, pair)))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "local")


def test_sets_of_earlier_versions_have_their_sources_in_the_shards(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wanted = rows_of(pair[0]) + rows_of(pair[1])
    for folder in pair:
        forget_sources(folder)
    merge_sets(tmp_path / "out", list(map(str, pair)))
    assert rows_of(tmp_path / "out") == wanted
    assert_whole(tmp_path / "out")


def test_companions_come_along(tmp_path: Path, tokenizer_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "hello {name}"}}\nbad {name}\n')
        prepare(_options(tmp_path / f"{name}.jsonl", tmp_path / name, tokenizer_path))
    merge_sets(tmp_path / "out", [str(tmp_path / "a"), str(tmp_path / "b")])
    lines = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert [line.count("bad a") + 2 * line.count("bad b") for line in lines] == [1, 2]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()
    assert_whole(tmp_path / "out")
    append_sets(tmp_path / "a", [str(tmp_path / "b")])
    assert_whole(tmp_path / "a")
    assert read_manifest(tmp_path / "a").counts == read_manifest(tmp_path / "out").counts


def test_an_appended_set_holds_what_a_merged_one_does(pair: tuple[Path, Path], tmp_path: Path) -> None:
    merged = merge_sets(tmp_path / "out", list(map(str, pair)))
    appended = append_sets(pair[0], [str(pair[1])])
    assert (appended.shards, appended.sources, appended.counts) == (merged.shards, merged.sources, merged.counts)
    assert (pair[0] / appended.lengths.file).read_bytes() == (tmp_path / "out" / "lengths.arrow").read_bytes()
    assert rows_of(pair[0]) == rows_of(tmp_path / "out")
    assert_whole(pair[0])
    assert inspect_set(pair[0]).source_documents == {"web": 10, "code": 18, "books": 7}
    more = a_set(tmp_path / "c", 4, name="f", seed=2)
    append_sets(pair[0], [str(more)])
    assert rows_of(pair[0]) == rows_of(tmp_path / "out") + rows_of(more)
    assert_whole(pair[0])


def test_a_failed_append_leaves_nothing(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = bytes_of(pair[0])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("seqmesh.tools.sets.merge.write_manifest", full)
    with pytest.raises(OSError, match="No space left"):
        append_sets(pair[0], [str(pair[1])])
    left = bytes_of(pair[0])
    assert {name: left[name] for name in before} == before


KILLED = """
import os, signal, sys
from pathlib import Path
from seqmesh.tools.sets import append
count, at = 0, int(sys.argv[3])
def killed(event, arguments):
    global count
    count += event == "os.rename"
    if event == "os.rename" and count == at:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(killed)
append.append_sets(Path(sys.argv[1]), [sys.argv[2]])
"""


def test_an_append_that_is_killed_leaves_the_old_set_whole_and_can_be_repeated(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    merged = merge_sets(tmp_path / "out", list(map(str, pair)))
    old = rows_of(pair[0])
    renames = len(merged.shards) - len(read_manifest(pair[0]).shards) + 2  # new shards, the index, the manifest
    for at in (2, renames):
        done = ran("-c", KILLED, *pair, str(at))
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert [problem for problem in verify_set(pair[0]) if not problem.warning] == []
        assert rows_of(pair[0]) == old
    append_sets(pair[0], [str(pair[1])])
    assert rows_of(pair[0]) == rows_of(tmp_path / "out")
    assert all(problem.file.endswith(".tmp") for problem in verify_set(pair[0]))


def test_appending_needs_a_set_of_this_machine(tmp_path: Path) -> None:
    data = [str(a_set(tmp_path / "a", 2))]
    with pytest.raises(FileNotFoundError, match=MANIFEST_NAME):
        append_sets(tmp_path / "nowhere", data)
    for command in (append_sets, merge_sets):
        with pytest.raises(ValueError, match="memory:/x is a URL: sets are read from there"):
            command(Path("memory://x"), data)


def _options(data: Path, out: Path, tokenizer: Path) -> PrepareOptions:
    return PrepareOptions(inputs=(str(data),), out=out, tokenizer=str(tokenizer), on_error="skip", shard_tokens=4000)
