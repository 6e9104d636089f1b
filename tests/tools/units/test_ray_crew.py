"""`prepare` on a Ray cluster of two nodes; what goes on there is in `tests.ray_prepare`, run once."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from seqmesh.loader.manifest import MANIFEST_NAME
from seqmesh.tools.inputs import find_files
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.tokenizers.file import load_tokenizer
from seqmesh.tools.units import cut
from seqmesh.tools.units.crew import AHEAD, Job
from seqmesh.tools.units.cut import units
from seqmesh.tools.units.filters import Filters
from seqmesh.tools.units.page import page_of
from seqmesh.tools.units.ray_crew import ray_crew, travelling
from tests.ray_prepare import SHARD_TOKENS
from tests.ray_spaces import short_folder, told_by

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def folder(texts: list[str]) -> Iterator[Path]:
    """Lines in a plain file, which workers read, in a compressed one, which travels, and for standard input."""
    with short_folder() as path:
        (path / "in").mkdir()
        lines = [json.dumps({"text": f"{text}{number}"}) + "\n" for number in range(2) for text in texts]
        (path / "in" / "a.jsonl").write_text("".join(lines))
        (path / "lines").write_text("".join(lines[::2]))
        (path / "in" / "b.jsonl.gz").write_bytes(gzip.compress("".join(reversed(lines)).encode()))
        yield path


@pytest.fixture(scope="module")
def found(folder: Path, tokenizer_path: Path) -> dict[str, Any]:
    return told_by("tests.ray_prepare", folder, str(tokenizer_path))


def test_output_is_the_same_whatever_happens_to_workers_and_nodes(
    found: dict[str, Any], folder: Path, tokenizer_path: Path
) -> None:
    here = folder / "here"
    with (folder / "lines").open() as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", lines)
        prepare(
            PrepareOptions(
                inputs=(str(folder / "in"), "-"),
                out=here,
                tokenizer=str(tokenizer_path),
                engine="tokenizers",
                shard_tokens=SHARD_TOKENS,
            )
        )
    assert found["faults"]["updates"] > 60  # the last of the faults had come by then
    assert found["faults"]["travelled"] > 3  # units of standard input
    names = sorted(path.name for path in here.iterdir())
    assert sorted(path.name for path in (folder / "out").iterdir()) == names
    assert len(names) > 10
    for name in set(names) - {MANIFEST_NAME}:
        assert (folder / "out" / name).read_bytes() == (here / name).read_bytes(), name
    manifests = [json.loads((path / MANIFEST_NAME).read_text()) for path in (here, folder / "out")]
    assert manifests[0] == manifests[1]


def test_units_come_back_in_order_and_no_more_than_some_are_under_way(found: dict[str, Any]) -> None:
    assert found["in order"] == [True] * 8
    assert max(found["ahead"]) == AHEAD - 1


def test_a_file_that_a_node_does_not_see_is_named_with_the_node(found: dict[str, Any]) -> None:
    where = r"OSError: node [0-9a-f]{8} at 127\.0\.0\.1 cannot read \S+/in/a\.jsonl, bytes 0 to 4000: "
    assert re.match(where + ".*No such file or directory.*; every node must see the inputs", found["not seen"])
    assert re.match(where + r"\S+ has \d+ bytes here, \d+ where the run was started", found["another file"])


def test_a_unit_that_kills_its_workers_ends_the_run_and_is_named(found: dict[str, Any]) -> None:
    assert re.match(
        r"ChildProcessError: 2 times a worker died that had \S+/in/a\.jsonl, bytes 0 to 4000, ", found["deadly"]
    )
    assert found["afterwards"] == 8  # the worker is up again


def test_a_crew_that_can_not_be_says_why(found: dict[str, Any]) -> None:
    other = r"RuntimeError: a worker cannot start: node [0-9a-f]{8} at 127\.0\.0\.1 has tokenizers [\d.]+: install "
    assert re.match(other, found["another version"])
    assert "tokenizers 0.0.1" in found["another version"]
    assert found["no room"].startswith("TimeoutError: no worker was up within 1 s: ")


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "some words"}\n')
    options = PrepareOptions(
        inputs=(str(tmp_path / "in.jsonl"),),
        out=tmp_path / "out",
        tokenizer=str(tokenizer_path),
        on="ray",
        ray_address="127.0.0.1:1",
    )
    with pytest.raises(ConnectionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: .*refused"):
        prepare(options)
    prepare(replace(options, on="local"))  # where it runs is no part of what is made


def test_lines_that_are_here_alone_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 100)
    lines = b"".join(b'{"text": "document %d of a file"}\n' % number for number in range(40))
    memory = fsspec.filesystem("memory")
    memory.pipe("/ray/lines.jsonl", lines)
    work = list(units(find_files(["memory://ray/lines.jsonl"])))
    here = [page_of(unit) for unit in work]
    sent = [travelling(unit) for unit in work]
    memory.rm("/ray/lines.jsonl")
    for page, unit in zip(here, sent, strict=True):
        assert vars(page_of(unit)) == vars(page)
    assert sum(len(page.texts) for page in here) == 40


def test_files_in_memory_are_refused(tokenizer_path: Path) -> None:
    fsspec.filesystem("memory").pipe("/ray/in/a.txt", b"some words")
    job = Job(tokenizer=load_tokenizer(tokenizer_path), engine="tokenizers", filters=Filters())
    with (
        pytest.raises(ValueError, match=r"memory://ray/in/a\.txt is in the memory of this process"),
        ray_crew(job, find_files(["memory://ray/in"]), workers=1, address="auto"),
    ):
        pass


def test_without_ray_the_extra_is_named(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "some words"}\n')
    code = "import sys; sys.modules['ray'] = None; from seqmesh.tools.cli import main; main()"
    command = [sys.executable, "-c", code, "prepare", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]
    result = subprocess.run(
        [*command, "--tokenizer", str(tokenizer_path), "--on", "ray"], capture_output=True, text=True, timeout=60
    )
    assert result.stderr == "error: this command needs ray: pip install 'seqmesh[ray]'\n"
    assert result.returncode == 1
