"""Workers: what they make comes in order, they are not run ahead of without bound, and a death is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children
from pathlib import Path

import fsspec
import numpy as np
import pytest

from seqmesh.loader.manifest import read_manifest
from seqmesh.tools.inputs import find_files
from seqmesh.tools.prepare import PrepareOptions, prepare
from seqmesh.tools.tokenizers.engines import build_engine
from seqmesh.tools.tokenizers.file import TokenizerFile, load_tokenizer
from seqmesh.tools.units import cut
from seqmesh.tools.units.crew import AHEAD, Crew, Job, workers_for
from seqmesh.tools.units.cut import Unit, units
from seqmesh.tools.units.encoder import Encoded, Encoder
from seqmesh.tools.units.filters import Filters

WORKERS = 2


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: Path) -> TokenizerFile:
    return load_tokenizer(tokenizer_path)


@pytest.fixture(scope="module")
def crew(tokenizer: TokenizerFile) -> Iterator[Crew]:
    with Crew(Job(tokenizer=tokenizer, engine="tokenizers", filters=Filters()), WORKERS) as crew:
        yield crew


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    """Twenty units or so, of which the first takes long."""
    monkeypatch.setattr(cut, "UNIT_BYTES", 1000)
    long = "a long beginning " * 20_000
    rest = (f'{{"text": "document {number} of a file"}}\n' for number in range(500))
    (tmp_path / "in.jsonl").write_text(f'{{"text": "{long}"}}\n{"".join(rest)}')
    found = list(units(find_files([str(tmp_path / "in.jsonl")])))
    return [found[0], *found[-20:]]


def test_units_come_back_in_order_and_no_more_than_some_are_under_way(
    crew: Crew, work: Sequence[Unit], tokenizer: TokenizerFile
) -> None:
    drawn = 0

    def source() -> Iterator[Unit]:
        nonlocal drawn
        for unit in work:
            drawn += 1
            yield unit

    encoder = Encoder(tokenizer, build_engine(tokenizer, "tokenizers"), Filters())
    for taken, (unit, encoded) in enumerate(crew.encode(source()), 1):
        assert drawn - taken < AHEAD * WORKERS
        assert unit is work[taken - 1]
        here = encoder.encode(unit)
        assert np.array_equal(encoded.ids, here.ids)
        assert np.array_equal(encoded.lengths, here.lengths)
    assert taken == drawn == len(work)


def test_errors_are_raised_when_their_turn_comes(crew: Crew, work: Sequence[Unit], tmp_path: Path) -> None:
    def source() -> Iterator[Unit]:
        yield from work[:3]
        raise ValueError("cannot read the rest")

    taken: list[tuple[Unit, Encoded]] = []
    with pytest.raises(ValueError, match="cannot read the rest"):
        taken.extend(crew.encode(source()))
    assert [unit for unit, _ in taken] == list(work[:3])
    taken.clear()
    (tmp_path / "in.jsonl").rename(tmp_path / "away.jsonl")
    try:
        with pytest.raises(FileNotFoundError, match=r"in\.jsonl"):
            taken.extend(crew.encode(work))
    finally:
        (tmp_path / "away.jsonl").rename(tmp_path / "in.jsonl")
    assert not taken
    assert len(list(crew.encode(work))) == len(work)  # the workers are as good as before


def test_a_worker_that_dies_ends_the_run_and_its_unit_is_named(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "UNIT_BYTES", 4000)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"text": "{"some words " * 20}{number}"}}\n' for number in range(1000)))
    options = PrepareOptions(
        inputs=(str(path),), out=tmp_path / "out", tokenizer=str(tokenizer_path), workers=2, shard_tokens=2000
    )
    updates, others = 0, set(active_children())

    def kill_one(_: object) -> None:
        nonlocal updates
        updates += 1
        if updates == 10:
            victim = next(child for child in active_children() if child not in others)
            victim.kill()

    with pytest.raises(ChildProcessError, match=r"a worker died while it had .*in\.jsonl, bytes \d+ to \d+: ") as told:
        prepare(options, progress=kill_one)
    assert isinstance(told.value.__cause__, BrokenProcessPool)
    begin, end = map(int, re.findall(r"bytes (\d+) to (\d+)", str(told.value))[0])
    assert end - begin == 4000
    assert set(active_children()) <= others
    prepare(options)
    prepare(PrepareOptions(inputs=(str(path),), out=tmp_path / "one", tokenizer=str(tokenizer_path), shard_tokens=2000))
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "one")


def test_small_inputs_and_those_in_memory_need_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(5))
    path = tmp_path / "in.jsonl"
    for units_of_input, workers in ((1, 1), (9, 2), (1000, 5)):
        with path.open("wb") as file:
            file.truncate(units_of_input * cut.UNIT_BYTES)  # a hole: nothing is written
        files = find_files([str(path)])
        assert workers_for(files, None) == workers
        assert workers_for(files, 7) == 7
    memory = fsspec.filesystem("memory")
    memory.pipe("/in.jsonl", b"{}")
    try:
        assert workers_for(find_files(["memory://in.jsonl"]), 7) == 1
    finally:
        memory.rm("/in.jsonl")


def test_workers_do_without_the_compiler() -> None:
    code = "import sys, seqmesh.tools.units.crew; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


SCRIPT = """
import os, sys
from pathlib import Path
from multiprocessing import active_children
from seqmesh.tools.prepare import PrepareOptions, prepare

def show(_):
    print(os.getpid(), *(child.pid for child in active_children()), flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    given, out, tokenizer = sys.argv[1:]
    prepare(PrepareOptions(inputs=(given,), out=Path(out), tokenizer=tokenizer, workers=2), progress=show)
"""


def test_workers_end_with_the_run_that_started_them(tmp_path: Path, tokenizer_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, *map(str, (tmp_path / "script.py", tmp_path / "in.jsonl", tmp_path / "out"))]
    with subprocess.Popen(
        [*command, str(tokenizer_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        own, *workers = map(int, process.stdout.readline().split())
        assert len(workers) == 1  # one unit: the other worker was never needed
        os.kill(own, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
