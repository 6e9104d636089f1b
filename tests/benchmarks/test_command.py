"""`seqmesh.tools.bench`: what it refuses, imports, prints and writes."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from seqmesh.benchmarks.harness import Results, Spread, absent, ratio, row
from seqmesh.tools import bench


def small_benchmark(*, quick: bool, against: tuple[str, ...]) -> Results:
    ours = row("case", "ours", Spread(median=6, low=5, high=7), "things/s")
    peers = [absent("case", peer, "things/s") for peer in against]
    return Results(rows=(ours, *peers), ratios=tuple(ratio(f"quick {quick}", ours, peer) for peer in peers))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MODULES", {"small": "small", "other": "other"})
    modules = {
        "small": SimpleNamespace(PEERS=("peer",), run=small_benchmark),
        "other": SimpleNamespace(PEERS=(), run=small_benchmark),
    }
    monkeypatch.setattr(bench, "import_module", modules.get)


@pytest.mark.usefixtures("small")
def test_it_prints_and_writes_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "found.json"
    bench.run(name="small", quick=True, json_path=target, against=("peer",), console=Console(width=120))
    found = json.loads(target.read_text())
    assert [r["candidate"] for r in found["rows"]] == ["ours", "peer"]
    assert found["ratios"][0]["figure"] == "quick True"
    assert found["environment"]["versions"]["peer"] is None
    assert "case/ours" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.usefixtures("small")
def test_all_runs_every_benchmark_and_gives_each_its_own_peers() -> None:
    report = bench.run(name="all", quick=False, against=("peer",), console=Console(quiet=True))
    assert [r.candidate for r in report.rows] == ["ours", "peer", "ours"]


@pytest.mark.usefixtures("small")
def test_unknown_names_and_peers_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="name is 'nothing': must be one of small, other, all"):
        bench.run(name="nothing", quick=True)
    with pytest.raises(ValueError, match="against is stranger: the peers are peer"):
        bench.run(name="all", quick=True, against=("stranger",))


def test_the_command_imports_nothing_heavy() -> None:
    heavy = ("numba", "torch", "pyarrow", "zmq", "numpy")
    script = f"import seqmesh.tools.bench, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_every_benchmark_is_what_the_command_expects() -> None:
    for module in bench.MODULES.values():
        benchmark = import_module(module)
        assert isinstance(benchmark.PEERS, tuple)
        assert callable(benchmark.run)
