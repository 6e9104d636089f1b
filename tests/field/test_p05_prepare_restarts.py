"""Field case: a killed job starts from zero, takes half a shard for a whole one, or mixes two tokenizers' tokens.

These are real processes, killed by SIGKILL; `tests/tools/test_resume_prepare.py` kills at every moment there is.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from seqmesh.loader.manifest import MANIFEST_NAME, read_manifest
from seqmesh.loader.shards import ShardSet
from seqmesh.tools.tokenizers.training import train_tokenizer

TEXTS = 10_000
WORDS = "the seven ranks of a long ring hold short documents while every loader waits for one more token 0123 "


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten thousand texts of uneven length in one file."""
    rng = random.Random(5)
    words = WORDS.split()
    path = tmp_path_factory.mktemp("source") / "corpus.jsonl"
    with path.open("w") as file:
        for number in range(TEXTS):
            text = " ".join(rng.choices(words, k=min(2000, int(rng.lognormvariate(4.2, 1.0)) + 1)))
            file.write(json.dumps({"text": text, "id": number}) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tokenizers of equal vocabulary size."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, text in (("a", WORDS), ("b", WORDS[::-1])):
        (folder / name).write_bytes(train_tokenizer([text] * 10, 280))
    return folder / "a", folder / "b"


# The command with units that are small beside the file, as they are with files worth killing a job for.
SMALL_UNITS = "from seqmesh.tools import cli; from seqmesh.tools.units import cut; cut.UNIT_BYTES = 200_000; cli.main()"


def command(source: Path, out: Path, tokenizer: Path, workers: int) -> list[str]:
    arguments = ["prepare", source, "--out", out, "--tokenizer", tokenizer, "--shard-tokens", 150_000]
    arguments += ["--engine", "tokenizers", "--workers", workers]
    return [sys.executable, "-c", SMALL_UNITS, *map(str, arguments)]


def environment(threads: int) -> dict[str, str]:
    return os.environ | {"RAYON_NUM_THREADS": str(threads), "COLUMNS": "300"}


def run(
    source: Path, out: Path, tokenizer: Path, *, threads: int = 1, workers: int = 1
) -> subprocess.CompletedProcess[str]:
    arguments = command(source, out, tokenizer, workers)
    return subprocess.run(arguments, env=environment(threads), capture_output=True, text=True, timeout=120)


def run_and_kill(source: Path, out: Path, tokenizer: Path, when: Callable[[], bool], *, workers: int = 1) -> bool:
    """Start a run and SIGKILL it as soon as `when` says so. Returns whether it was killed before it ended."""
    # Of low priority, so that on a busy machine it does not run on while this process waits to see it.
    patient = ["nice", "-n", "10", *command(source, out, tokenizer, workers)]
    with subprocess.Popen(patient, env=environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not when():
            time.sleep(0.002)
        process.kill()
    return process.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(source: Path, tokenizers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The set that a run in one piece makes."""
    out = tmp_path_factory.mktemp("whole") / "set"
    result = run(source, out, tokenizers[0])
    assert result.returncode == 0, result.stderr
    assert read_manifest(out).documents == TEXTS
    assert len(read_manifest(out).shards) > 7
    yield out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shards(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("shard-*.arrow")}


def assert_only_whole_shards(out: Path, whole: Path) -> None:
    """Whatever bears the name of a shard is one, and nothing takes the folder for a set."""
    for path in out.glob("*.arrow"):
        assert path.read_bytes() == (whole / path.name).read_bytes()
        pa.ipc.open_file(str(path))
    others = {path.suffix for path in out.iterdir() if path.suffix != ".arrow"}
    assert others <= {".tmp", ".json", ".jsonl", ".lock"}
    assert not (out / MANIFEST_NAME).exists()
    with pytest.raises(FileNotFoundError, match="not a finished shard set"):
        ShardSet(out)


@pytest.mark.parametrize(("packed", "workers", "after"), [(False, 3, 1), (True, 1, 3)])
def test_killed_at_sixty_percent_of_one_file_it_redoes_one_shard_at_most(
    source: Path,
    tokenizers: tuple[Path, Path],
    whole: Path,
    tmp_path: Path,
    packed: bool,
    workers: int,
    after: int,
) -> None:
    """Plain or compressed, with any number of workers before and after the kill."""
    out = tmp_path / "set"
    if packed:
        source = Path(shutil.copy2(source, tmp_path))
        source = source.rename(tmp_path / "corpus.jsonl.gz")
        source.write_bytes(gzip.compress(source.read_bytes(), 1))
    enough = round(len(shards(whole)) * 0.6)
    assert run_and_kill(source, out, tokenizers[0], lambda: len(shards(out)) >= enough, workers=workers)
    before = shards(out)
    assert enough <= len(before) < len(shards(whole))
    assert_only_whole_shards(out, whole)
    result = run(source, out, tokenizers[0], workers=after)
    assert result.returncode == 0, result.stderr
    assert f"{source}, line " in result.stdout
    redone = [name for name, file in before.items() if shards(out)[name] != file]
    assert len(redone) <= 1
    assert contents(out) == contents(whole)


def test_killed_at_random_moments_it_gets_there_all_the_same(
    source: Path, tokenizers: tuple[Path, Path], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "set"
    rng = random.Random()
    redone = kills = 0
    while kills < 4 and not (out / MANIFEST_NAME).exists():
        before = shards(out) if out.exists() else {}
        goal, pause = len(before) + rng.randrange(3), rng.random() * 0.2

        def moment(goal: int = goal, pause: float = pause) -> bool:
            if not out.exists() or len(shards(out)) < goal:
                return False
            time.sleep(pause)
            return True

        kills += run_and_kill(source, out, tokenizers[0], moment)
        redone += sum(shards(out)[name] != file for name, file in before.items())
        if not (out / MANIFEST_NAME).exists():
            assert_only_whole_shards(out, whole)
    assert kills
    before = shards(out)
    result = run(source, out, tokenizers[0])  # the last kill may have come too late to matter
    assert result.returncode == 0 or "already holds a finished shard set" in result.stderr
    redone += sum(shards(out)[name] != file for name, file in before.items())
    assert redone <= kills
    assert contents(out) == contents(whole)


def test_another_tokenizer_is_refused_before_and_after_the_end(
    source: Path, tokenizers: tuple[Path, Path], whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "set"
    assert run_and_kill(source, out, tokenizers[0], lambda: len(shards(out)) >= 2)
    before = contents(out)
    refused = run(source, out, tokenizers[1])
    assert refused.returncode == 1
    assert "made differently: tokenizer was " in refused.stderr
    assert contents(out) == before
    shutil.copytree(whole, tmp_path / "finished")
    refused = run(source, tmp_path / "finished", tokenizers[1])
    assert refused.returncode == 1
    assert "made with another tokenizer" in refused.stderr
    assert contents(tmp_path / "finished") == contents(whole)


def test_threads_and_places_change_neither_fingerprint_nor_bytes(
    source: Path, tokenizers: tuple[Path, Path], whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.copy2(source, tmp_path / "elsewhere"))
    assert run_and_kill(source, tmp_path / "begun", tokenizers[0], lambda: len(shards(tmp_path / "begun")) >= 2)
    (tmp_path / "begun").rename(tmp_path / "ended")
    begun = shards(tmp_path / "ended")
    for out in (tmp_path / "ended", tmp_path / "anew"):
        result = run(moved, out, tokenizers[0], threads=2)
        assert result.returncode == 0, result.stderr
        assert read_manifest(out).tokenizer == read_manifest(whole).tokenizer
        assert contents(out) == contents(whole)
    assert sum(shards(tmp_path / "ended")[name] != file for name, file in begun.items()) <= 1
