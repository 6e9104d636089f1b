"""The loader benchmark on a small set, with its real processes: every way of reading delivers every token."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqmesh.benchmarks import loader, peers_reading, processes
from seqmesh.benchmarks.harness import Results, installed_version
from seqmesh.benchmarks.lengths import python_documents
from seqmesh.benchmarks.loader import Scale, case_name
from seqmesh.benchmarks.peers_corpus import Corpus
from seqmesh.benchmarks.peers_loading import RIVALS, Job
from seqmesh.benchmarks.readings import CAPACITY, UNITS, USES
from seqmesh.benchmarks.shards import random_shards
from seqmesh.loader.shards import ShardSet

TOKENS = 400_000
SCALE = Scale(tokens=TOKENS, repeats=1, peer_repeats=1, variants=1, positions=2, starts=1)
ABSENT = "torchtitan"
SHAPES = {shape: loader.SHAPES[shape] for shape in ((1, CAPACITY), (2, CAPACITY))}  # each starts processes


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(peers_reading.ENVIRONMENTS, raising=False)
        patch.setattr(loader, "SHAPES", SHAPES)
        yield loader.measure_set(SCALE, ("torch", ABSENT))


def test_every_way_reads_the_whole_set(results: Results) -> None:
    rows = {r.name: r for r in results.rows}
    assert len(rows) == len(results.rows)
    for (ranks, pack), names in SHAPES.items():
        for kind, unit in UNITS.items():
            for name in names:
                found = rows[f"{case_name(ranks, pack)}, {kind}/{name}"]
                assert found.unit == unit
                assert found.counts["tokens"] == USES[name].passes * TOKENS
    assert rows["beside peers, total/torch, 1 worker"].counts["tokens"] == TOKENS
    assert rows["resume/inline"].counts == {"positions": SCALE.positions}
    started, whole = rows["first_batch, CPU/loader"].value, rows["first_batch, wall/loader"].value
    assert started is not None
    assert whole is not None
    assert min(started, whole) > 0.02  # a process cannot start in less


def test_peers_that_are_not_installed_are_absent(results: Results) -> None:
    values = {r.name: r.value for r in results.rows}
    for kind in peers_reading.CASES:
        assert values[f"beside peers, {kind}/torch, 1 worker"] is not None
        if installed_version(RIVALS[ABSENT].package) is None:
            assert values[f"beside peers, {kind}/{ABSENT}"] is None


def test_every_figure_is_there_and_follows_from_its_rows(results: Results) -> None:
    values = {r.name: r.value for r in results.rows} | {
        f"{r.name}:{name}": count for r in results.rows for name, count in r.counts.items()
    }
    for each in results.ratios:
        numerator, denominator = values[each.numerator], values[each.denominator]
        assert numerator is not None
        assert denominator
        assert each.value == numerator / denominator
    figures = [r.figure for r in results.ratios]
    assert figures.count("trainer_rate") == len(SHAPES)
    assert figures.count("total_rate") == figures.count("total_rate_full") == 1
    assert {
        "gather_vs_roof",
        "trainer_rate_copy_vs_copy",
        "total_rate_vs_best_peer",
        "trainer_rate_vs_best_peer_process",
    } <= set(figures)
    rates = {r.name: r.value for r in results.rows}
    for each in results.ratios:
        if each.figure == "trainer_rate":
            of = rates[each.numerator.removesuffix(":tokens")]
            assert of is not None
            assert each.value == pytest.approx(of)  # million tokens per CPU-second


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    lengths = python_documents(TOKENS, CAPACITY)
    shards = random_shards(folder / "set", lengths, vocab_size=loader.VOCABULARY)
    peers_reading.write_corpus(shards, lengths, folder / "corpus")
    return folder / "corpus"


def test_a_corpus_is_the_set_and_is_cut_into_packs_of_whole_documents(corpus: Path) -> None:
    held = Corpus(corpus, 10**9)
    ids = np.concatenate([np.asarray(each) for each in _documents(corpus.parent / "set")])
    assert (held.tokens == ids).all()
    packs = list(held.packs(CAPACITY))
    assert sorted(index for pack in packs for index in pack) == list(range(len(held.lengths)))
    assert max(int(held.lengths[pack].sum()) for pack in packs) <= CAPACITY
    few = Corpus(corpus, 3)
    assert sorted(index for pack in few.packs(10) for index in pack) == [0, 1, 2]


def _documents(folder: Path) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    shards = ShardSet(folder)
    return (shards.tokens(document) for document in range(len(shards)))


def peer(corpus: Path, name: str, *, exact: bool) -> peers_reading.Peer:
    documents = len(Corpus(corpus, TOKENS).lengths)
    job = Job(
        rival=name, action="read", corpus=str(corpus), documents=documents, exported=str(corpus / "x"), pack=CAPACITY
    )
    rival = replace(RIVALS[name], exact=exact)
    return peers_reading.Peer(name=name, rival=rival, version="1", job=job, tokens=TOKENS)


def test_a_peer_that_loses_tokens_is_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"wall": 1.0, "trainer": 1.0, "total": 2.0}
    found = {"tokens": 399_999, "rest_tokens": 300_000, "imports": 1.0, "first": spent, "rest": spent}
    monkeypatch.setattr(peers_reading, "answer", lambda *_: found)
    with pytest.raises(RuntimeError, match="torch, 0 workers: 399999 tokens came of 400000"):
        peer(corpus, "torch", exact=True).read()
    leaves_out_ends = peer(corpus, "torch", exact=False)
    assert leaves_out_ends.read().tokens == 399_999
    for wrong in (100_000, 400_001):
        found["tokens"] = wrong
        with pytest.raises(RuntimeError, match=f"{wrong} tokens came of 400000"):
            leaves_out_ends.read()


def test_a_peer_that_fails_says_why(corpus: Path) -> None:
    job = replace(peer(corpus, "torch", exact=True).job, corpus=str(corpus / "nowhere"))
    with pytest.raises(RuntimeError, match=r"(?s)torch ended with exit code 1 in read:.*FileNotFoundError"):
        peers_reading.answer("torch", job)


def test_an_environment_of_its_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grain" / "bin").mkdir(parents=True)
    interpreter = tmp_path / "grain" / "bin" / "python"
    interpreter.symlink_to(sys.executable)
    monkeypatch.setenv(peers_reading.ENVIRONMENTS, str(tmp_path))
    assert peers_reading.own_interpreter("grain") == peers_reading.own_interpreter("grain_first_fit") == interpreter
    assert peers_reading.own_interpreter("torch") is None


def test_cpu_of_children_counts_those_that_live_and_those_that_ended() -> None:
    busy = "x = 0\nfor i in range(6_000_000): x += i\nprint(1, flush=True)\ninput()"
    before = processes.cpu_of_children()
    with subprocess.Popen([sys.executable, "-c", busy], stdin=-1, stdout=-1) as child:
        assert child.stdout
        assert child.stdout.readline() == b"1\n"
        assert child.pid in processes.descendants(os.getpid())
        alive = processes.cpu_of_children() - before
        child.communicate(b"\n")
    ended = processes.cpu_of_children() - before
    assert 0.05 < alive <= ended + 0.02


def test_memory_is_that_of_the_process() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs the kernel's account of a process's memory")
    before = processes.memory_of(os.getpid())["anonymous"]
    held = np.ones(64 << 20, np.uint8)
    assert 60 < processes.memory_of(os.getpid())["anonymous"] - before < 80
    assert held.sum() == len(held)
    begin, cpu = time.process_time(), processes.cpu_seconds(os.getpid())
    assert abs(cpu - begin) < 0.5
