"""New folders appear whole or not at all, whatever ends the command that makes them."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from seqmesh.loader.errors import ShardError
from seqmesh.loader.manifest import read_manifest
from seqmesh.tools.cli import app
from seqmesh.tools.sets.convert import ConvertOptions, convert_set
from seqmesh.tools.sets.folder import new_folder
from seqmesh.tools.sets.reshard import reshard_set
from seqmesh.tools.sets.split import parse_part, split_set
from tests.tools.sets.sets import VOCAB, a_set, assert_whole, bytes_of, rows_of
from tests.warm import ran


def test_what_a_killed_run_left_is_replaced_and_two_runs_do_not_mix(tmp_path: Path) -> None:
    left = tmp_path / ".out.making.tmp"
    (left / "folder").mkdir(parents=True)
    (left / "shard-00000.arrow").write_bytes(b"half")
    with new_folder(tmp_path / "out") as folder:
        assert list(folder.iterdir()) == []
        with pytest.raises(BlockingIOError, match="another command is making"), new_folder(tmp_path / "out"):
            pass
        (folder / "file").write_text("whole")
    assert bytes_of(tmp_path / "out") == {"file": b"whole"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_appears_meanwhile_is_not_touched(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="out exists already"), new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("ours")
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert bytes_of(tmp_path / "out") == {}


@pytest.mark.parametrize("to", ["seqmesh", "parquet", "huggingface", "megatron", "reshard", "split"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, to: str) -> None:
    data = a_set(tmp_path / "set", 2000, shard_tokens=1 << 20)
    if to == "seqmesh":
        convert_set(str(data), tmp_path / "in", ConvertOptions(to="huggingface"))
        data = tmp_path / "in"
    before = sorted(path.name for path in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large|write"):
            if to == "reshard":
                reshard_set(str(data), tmp_path / "out")
            elif to == "split":
                split_set(str(data), [parse_part(f"{tmp_path}/{name}=0.5") for name in ("out", "other")])
            else:
                convert_set(str(data), tmp_path / "out", ConvertOptions(to=to, vocab_size=VOCAB))  # type: ignore[arg-type]  # a parameter
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_damaged_set_is_refused_by_everything_that_reads_it(tmp_path: Path) -> None:
    data = a_set(tmp_path / "set", 40)
    path = data / read_manifest(data).shards[-1].file
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    for command in (
        lambda: reshard_set(str(data), tmp_path / "out"),
        lambda: reshard_set(str(data), tmp_path / "out", shuffle_seed=0),
        lambda: split_set(str(data), [parse_part(f"{tmp_path}/out=1")]),
        lambda: convert_set(str(data), tmp_path / "out", ConvertOptions(to="parquet")),
    ):
        with pytest.raises(ShardError, match=rf"{path.name}: is damaged: its checksum differs"):
            command()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


KILLED = """
import os, signal, sys
from pathlib import Path
from seqmesh.tools.sets import reshard
def killed(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("manifest.json"):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(killed)
reshard.reshard_set(sys.argv[1], Path(sys.argv[2]), shard_tokens=50)
"""


def test_a_killed_command_leaves_nothing_under_the_name_and_can_be_repeated(tmp_path: Path) -> None:
    data, out = a_set(tmp_path / "set", 40), tmp_path / "out"
    done = ran("-c", KILLED, data, out)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    reshard_set(str(data), out, shard_tokens=50)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "set"]
    assert rows_of(out) == rows_of(data)


def test_the_commands_do_what_their_options_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_set(tmp_path / "a", 30, sources=["web", "code"] * 15)
    a_set(tmp_path / "b", 12, name="e", seed=1, sources=["books"] * 12)
    for line, said in (
        ("merge ab a b", "ab: 42 documents"),
        ("append a b", "a: 42 documents"),
        ("split ab train=0.75 valid=0.25 --seed 3", "valid: 11 documents"),
        ("split ab most=3/4 some=1/4 --every", "some: 11 documents"),
        ("split ab by --by-source", "by/books: 12 documents"),
        ("reshard ab shuffled --shard-tokens 50 --shuffle-seed 1", "shuffled: 42 documents"),
        ("convert ab table --to parquet", "not kept: the vocabulary's size, 1000"),
        ("convert table back --to seqmesh --vocab-size 1000", "back: 42 documents"),
        ("verify back", "back: ok"),
    ):
        result = CliRunner().invoke(app, line.split())
        assert result.exit_code == 0, result.exception
        assert said in result.output, line
    assert rows_of("back") == rows_of("ab") == rows_of("a")
    assert sorted(rows_of("shuffled")) == sorted(rows_of("most") + rows_of("some")) == sorted(rows_of("ab"))
    assert sorted(row for name in ("web", "code", "books") for row in rows_of(f"by/{name}")) == sorted(rows_of("ab"))
    for name in ("ab", "a", "train", "by/web", "shuffled"):
        assert_whole(tmp_path / name)
    shown = CliRunner().invoke(app, ["cat", "back", "d3", "--ids", "--json"])
    assert shown.output.startswith('{"id": "d3", "source": "code", "ids": [')
