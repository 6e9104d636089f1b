"""`seqmesh bench prepare` on a corpus small enough for tests: what it compares, and what it refuses to compare."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from seqmesh.benchmarks import prepare as benchmark
from seqmesh.benchmarks.bare_engine import Bare
from seqmesh.benchmarks.children import Spent, spend
from seqmesh.benchmarks.prepare import Pair
from seqmesh.benchmarks.preparing import Ground, Made, prepare, prepare_bare
from seqmesh.benchmarks.processes import measurable

pytestmark = pytest.mark.skipif(not measurable(), reason="needs Linux's account of processes")


def made(cpu: float, tokens: int, checksum: str = "") -> Made:
    return Made(spent=Spent(cpu=cpu, wall=2 * cpu, peak=0, said=""), tokens=tokens, checksum=checksum or str(tokens))


def pair(less: Made, more: Made) -> Pair:
    return Pair(less=less, more=more, whole=less)


def test_prepare_and_the_bare_engine_make_the_same_ids(tmp_path: Path) -> None:
    ground = Ground.prepared(tmp_path, size=200_000, vocabulary=600)
    ours, bare = prepare(ground, ground.corpus, "tiktoken", 1), prepare_bare(ground, ground.corpus, "tiktoken", 1)
    assert ours.checksum == bare.checksum
    documents = len(ground.corpus.read_bytes().splitlines())
    assert ours.tokens == bare.tokens + documents  # which has no marks
    assert ours.spent.cpu > 0 < bare.cpu
    assert ground.repeated(3).read_bytes() == 3 * ground.corpus.read_bytes()
    assert ground.corpus.read_bytes().startswith(ground.half.read_bytes())
    assert not list(tmp_path.glob("out*"))


def test_what_a_process_takes_counts_what_it_starts_and_a_failure_is_told() -> None:
    inner = "x = bytearray(80_000_000)\nfor n in range(3_000_000): pass\nimport time; time.sleep(0.3)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    spent = spend([sys.executable, "-c", outer], watch=True)
    alone = spend([sys.executable, "-c", "print('done')"])
    assert spent.cpu > alone.cpu
    assert spent.peak > 80_000_000
    assert (alone.said, alone.peak) == ("done\n", 0)
    with pytest.raises(RuntimeError, match=r"ended with exit code 3:\n(?s:.*)lost"):
        spend([sys.executable, "-c", "print('lost'); raise SystemExit(3)"])


def test_the_steady_rate_leaves_the_start_out() -> None:
    found = pair(made(cpu=3.0, tokens=2_000_000), made(cpu=11.0, tokens=18_000_000))
    assert found.rate("cpu") == 2.0
    assert found.rate("wall") == 1.0
    assert found.start == 2.0


def test_different_ids_are_not_compared() -> None:
    less, more = made(1.0, 10, "a"), made(2.0, 20, "b")
    bare = [Bare(wall=1.0, cpu=1.0, tokens=9, checksum=each) for each in ("a", "")]
    benchmark._check({"one": [pair(less, more)], "bare": [*bare]})
    with pytest.raises(RuntimeError, match="different ids of the same texts: one, other"):
        benchmark._check({"one": [pair(less, more)], "other": [pair(made(1.0, 10, "c"), more)]})
    with pytest.raises(RuntimeError, match="different ids"):
        benchmark._check({"one": [pair(less, more), pair(less, made(2.0, 20, "c"))]})
