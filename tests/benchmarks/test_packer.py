"""The packing benchmark on a small size: the rows, figures and counts are there and fit together."""

import numpy as np
import pytest

from seqmesh.benchmarks import packer
from seqmesh.benchmarks.harness import Results, Spread, absent, row
from seqmesh.benchmarks.lengths import python_documents, python_lengths, web_lengths


@pytest.fixture(scope="module")
def results() -> Results:
    return packer.run(quick=True, documents=2_000)


def test_every_case_has_its_candidates(results: Results) -> None:
    names = [r.name for r in results.rows]
    assert len(set(names)) == len(names)
    for case in ("pack web", "pack python"):
        candidates = {r.candidate for r in results.rows if r.case == case}
        assert candidates == {"seqmesh", "roof", "next fit in Python", *packer.PEERS}
    for case in ("partition 2000 in 64", "plan 1M tokens on 64", "plan 8M tokens on 8"):
        assert f"{case}/seqmesh" in names


def test_every_figure_is_there_and_follows_from_its_rows(results: Results) -> None:
    assert [r.figure for r in results.ratios] == [
        "pack_vs_roof",
        "pack_bfd_vs_best_peer",
        "pack_vs_next_fit",
        "bins_vs_bound",
    ] * 2
    values = {r.name: r.value for r in results.rows}
    for each in results.ratios:
        if each.figure in ("pack_vs_roof", "pack_vs_next_fit"):
            numerator, denominator = values[each.numerator], values[each.denominator]
            assert numerator is not None
            assert denominator is not None
            assert each.value == numerator / denominator


def test_no_packer_gets_under_the_bound(results: Results) -> None:
    counted = [r.counts for r in results.rows if "bins" in r.counts]
    assert len(counted) >= 4
    assert all(counts["bins"] >= counts["bound"] for counts in counted)


def test_the_best_peer_is_the_fastest_of_those_that_are_as_tight() -> None:
    def at(speed: float) -> Spread:
        return Spread(median=speed, low=speed, high=speed)

    rows = {
        "seqmesh": row("case", "seqmesh", at(60), "d/s", bins=10, bound=10),
        "roof": row("case", "roof", at(600), "d/s"),
        "next fit in Python": row("case", "next fit in Python", at(6), "d/s", bins=12, bound=10),
        "slow": row("case", "slow", at(20), "d/s", bins=10, bound=10),
        "fast": row("case", "fast", at(30), "d/s", bins=10, bound=10),
        "loose": row("case", "loose", at(50), "d/s", bins=11, bound=10),
        "missing": absent("case", "missing", "d/s"),
    }
    found = {r.figure: r for r in packer.packing_ratios(rows, ("slow", "fast", "loose", "missing"))}
    assert (found["pack_bfd_vs_best_peer"].value, found["pack_bfd_vs_best_peer"].denominator) == (2, "case/fast")
    none = {r.figure: r for r in packer.packing_ratios(rows, ("missing",))}
    assert none["pack_bfd_vs_best_peer"].value is None


def test_drawn_lengths_are_what_they_say() -> None:
    for lengths in (web_lengths(5_000, 32_768), python_lengths(5_000, 32_768)):
        assert lengths.dtype == np.int64
        assert len(lengths) == 5_000
        assert 1 <= int(lengths.min()) <= int(lengths.max()) <= 32_768
    assert 500 < np.median(web_lengths(100_000, 32_768)) < 700
    assert int(python_documents(1 << 20, 4_096).sum()) == 1 << 20
    assert int(python_documents(100, 4_096).sum()) == 100
    assert (web_lengths(100, 4_096) == web_lengths(100, 4_096)).all()
