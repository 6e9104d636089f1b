"""The packing benchmark on a small size: the rows, figures and counts are there and fit together."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from seqmesh.benchmarks import packer, packer_memory, processes
from seqmesh.benchmarks.harness import Results, Spread, absent, installed_version, row
from seqmesh.benchmarks.lengths import SETS, python_documents, python_lengths, web_lengths
from seqmesh.benchmarks.packing import CSR, FLOOR, OURS, ROOF, SEQMESH, best_peer, packing, packing_ratios
from seqmesh.benchmarks.partitioning import BASELINE, document_costs, karmarkar_karp_equal
from seqmesh.benchmarks.peers_packing import ADAPTERS, FAST, SLOW, check
from seqmesh.packer.bins import METHODS

DOCUMENTS = 500
ALWAYS = {SEQMESH, CSR, ROOF, FLOOR}


@pytest.fixture(scope="module")
def results() -> Results:
    """Only seqpacker is asked for, which is quick where it is installed."""
    return packer.run(quick=True, against=("seqpacker",), documents=DOCUMENTS)


def test_every_case_has_its_candidates(results: Results) -> None:
    names = [r.name for r in results.rows]
    assert len(set(names)) == len(names)
    candidates = {
        case: {r.candidate for r in results.rows if r.case == case} for case in {r.case for r in results.rows}
    }
    for case in ("pack web32k, 500", "pack sft8k, 500", "pack wlbllm, 500"):
        assert candidates[case] == ALWAYS | {"seqpacker"}
    assert candidates["methods sft8k, 500"] == set(METHODS)
    assert candidates["memory web32k, 500"] == {SEQMESH, CSR, "seqpacker"}
    assert candidates["partition_equal 448 in 64"] == {SEQMESH, BASELINE}
    assert {"call web128k, 10K", "stream web32k, 500, K=8", "partition 500 in 8", "plan 8M tokens on 8"} <= set(
        candidates
    )


def test_every_figure_is_there_and_follows_from_its_rows(results: Results) -> None:
    figures = Counter(r.figure for r in results.ratios)
    packed = len({r.case for r in results.rows if r.case.startswith("pack ")})
    for figure in (
        "pack_vs_roof",
        "pack_bfd_vs_best_peer",
        "pack_csr_vs_best_peer",
        "pack_vs_next_fit",
        "bins_vs_bound",
    ):
        assert figures[figure] == packed
    assert (figures["stream_excess"], figures["partition_equal"]) == (4, 2)
    values = {r.name: r.value for r in results.rows} | {
        f"{r.name}:{name}": count for r in results.rows for name, count in r.counts.items()
    }
    for each in results.ratios:
        if each.value is not None:
            numerator, denominator = values[each.numerator], values[each.denominator]
            assert numerator is not None
            assert denominator
            assert each.value == numerator / denominator


def test_no_packer_gets_under_the_bound_or_loses_a_document(results: Results) -> None:
    counted = [r.counts for r in results.rows if {"bins", "bound", "overfull"} <= set(r.counts)]
    assert len(counted) >= 9
    for counts in counted:
        assert counts["bins"] >= counts["bound"]
        assert (counts["overfull"], counts["missing"]) == (0, 0)


def test_absent_peers_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqmesh.benchmarks.packing.installed_version", lambda _package: None)
    found = packing("case", web_lengths(100, 32_768), 32_768, packer.PEERS, repeats=1)
    values = {r.candidate: r.value for r in found.rows}
    assert set(values) == ALWAYS | set(packer.PEERS)
    assert all(values[peer] is None for peer in packer.PEERS)
    figures = {r.figure: r.value for r in found.ratios}
    assert figures["pack_bfd_vs_best_peer"] is None
    assert all(figures[f"pack_vs_{peer}"] is None for peer in SLOW)


@pytest.mark.parametrize("peer", ADAPTERS)
@pytest.mark.filterwarnings("default")  # what others warn of is theirs
def test_a_peer_packs_every_document(peer: str) -> None:
    if installed_version(peer) is None:
        pytest.skip(f"{peer} is not installed")
    lengths = SETS["sft8k"].draw(200)
    prepared = ADAPTERS[peer](lengths, 8_192)
    counts = check(prepared.packed(prepared.call()), lengths, 8_192)
    assert (counts["overfull"], counts["missing"]) == (0, 0)
    assert int(lengths.sum()) <= counts["bins"] * 8_192


@pytest.mark.parametrize("name", OURS)
def test_our_candidates_are_checked_like_peers(name: str) -> None:
    lengths = SETS["uniform32k"].draw(300)
    prepared = OURS[name](lengths, 32_768)
    counts = check(prepared.packed(prepared.call()), lengths, 32_768)
    assert (counts["overfull"], counts["missing"]) == (0, 0)


def test_wrong_answers_are_counted() -> None:
    lengths = np.array([5, 5, 3, 2])
    packed = np.array([5, 5, 2, 7]), np.array([2, 0, 2])
    assert check(packed, lengths, 9) == {"bins": 3, "overfull": 1, "missing": 1}


def test_the_best_peer_is_the_fastest_of_those_that_are_right_and_as_tight() -> None:
    def at(speed: float) -> Spread:
        return Spread(median=speed, low=speed, high=speed)

    right = {"overfull": 0, "missing": 0, "bound": 10}
    rows = {
        SEQMESH: row("case", SEQMESH, at(60), "d/s", bins=10, **right),
        CSR: row("case", CSR, at(45), "d/s", bins=10, **right),
        ROOF: row("case", ROOF, at(600), "d/s"),
        FLOOR: row("case", FLOOR, at(6), "d/s", bins=12, **right),
        "slow": row("case", "slow", at(20), "d/s", bins=10, **right),
        "fast": row("case", "fast", at(30), "d/s", bins=10, **right),
        "loose": row("case", "loose", at(50), "d/s", bins=11, **right),
        "lossy": row("case", "lossy", at(50), "d/s", bins=10, overfull=0, missing=1, bound=10),
        "bursting": row("case", "bursting", at(50), "d/s", bins=9, overfull=1, missing=0, bound=10),
        "missing": absent("case", "missing", "d/s"),
    }
    peers = ("slow", "fast", "loose", "lossy", "bursting", "missing")
    found = {r.figure: r for r in packing_ratios(rows, peers)}
    assert (found["pack_bfd_vs_best_peer"].value, found["pack_bfd_vs_best_peer"].denominator) == (2, "case/fast")
    assert (found["pack_csr_vs_best_peer"].value, found["pack_csr_vs_best_peer"].denominator) == (1.5, "case/fast")
    assert best_peer(rows, ("missing",)).value is None


def test_the_baseline_gives_every_part_as_many_items() -> None:
    costs = document_costs(96, seed=3).tolist()
    parts = karmarkar_karp_equal(costs, 8)
    assert sorted(item for part in parts for item in part) == list(range(96))
    assert {len(part) for part in parts} == {12}
    assert karmarkar_karp_equal(costs, 8) == parts
    heaviest = max(sum(costs[item] for item in part) for part in parts)
    in_order = max(sum(costs[part::8]) for part in range(8))
    assert sum(costs) / 8 <= heaviest < in_order


def test_the_baseline_on_cases_that_can_be_followed() -> None:
    # {8, 7} and {6, 5}: spreads 1 and 1, so the state of 8 comes first; 8 joins 5, 7 joins 6.
    assert [sorted(part) for part in karmarkar_karp_equal([8, 7, 6, 5], 2)] == [[0, 3], [1, 2]]
    assert [sorted(part) for part in karmarkar_karp_equal([4, 4, 4], 1)] == [[0, 1, 2]]
    assert sorted(karmarkar_karp_equal([3, 1, 2], 3)) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="5 costs do not make 2 parts"):
        karmarkar_karp_equal([1] * 5, 2)


@pytest.mark.skipif(not processes.measurable(), reason="needs Linux's account of a process's memory")
def test_a_child_measures_memory(tmp_path: Path) -> None:
    lengths = web_lengths(200_000, 32_768)
    extra, bins = packer_memory.extra_bytes(CSR, lengths, 32_768)
    assert bins >= int(lengths.sum()) // 32_768
    assert lengths.nbytes <= extra < 20 * lengths.nbytes  # at least what it gives
    file = tmp_path / "lengths.npy"
    np.save(file, lengths[:2_000])
    command = [sys.executable, "-m", "seqmesh.benchmarks.packer_memory", SEQMESH, "32768", str(file)]
    assert set(json.loads(subprocess.check_output(command, timeout=60))) == {"bytes", "bins"}


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_drawn_as_it_says(name: str) -> None:
    chosen = SETS[name]
    lengths = chosen.draw(5_000)
    assert lengths.dtype == np.int64
    assert len(lengths) == 5_000
    assert 1 <= int(lengths.min()) <= int(lengths.max()) <= chosen.capacity
    assert (chosen.draw(5_000) == lengths).all()


def test_real_lists_are_whole() -> None:
    for name, documents in (*packer.WHOLE_LISTS.items(), ("wikipedia", 1_000_000)):
        assert len(SETS[name].draw(2_000_000)) == documents


def test_drawn_lengths_are_what_they_say() -> None:
    assert 500 < np.median(web_lengths(100_000, 32_768)) < 700
    assert len(python_lengths(10, 32_768)) == 10
    assert int(python_documents(1 << 20, 4_096).sum()) == 1 << 20
    assert int(python_documents(100, 4_096).sum()) == 100
    assert int(SETS["half32k"].draw(1_000).min()) > 32_768 // 2


def test_the_command_measures_every_peer_that_has_an_adapter() -> None:
    assert set(packer.PEERS) == {*FAST, *SLOW}
    assert packer.case_name("pack", "web32k", 10_000_000) == "pack web32k, 10M"
    assert packer.case_name("pack", "wlbllm", 99_519) == "pack wlbllm, 99519"
