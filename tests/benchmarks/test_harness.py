"""The harness of the benchmarks. No test looks at how long anything takes."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from seqmesh.benchmarks.harness import (
    Report,
    Results,
    Spread,
    absent,
    chosen_peers,
    count_ratio,
    cpu_model,
    environment,
    interleave,
    measure,
    quantity,
    ratio,
    row,
    show,
)


def fake_clock(*times: float) -> Callable[[], float]:
    readings: Iterator[float] = iter(times)
    return lambda: next(readings)


def test_candidates_take_turns_and_the_first_round_is_thrown_away() -> None:
    calls: list[str] = []
    counter = itertools.count()

    def candidate(name: str) -> Callable[[], int]:
        def call() -> int:
            calls.append(name)
            return next(counter)

        return call

    results = interleave({name: candidate(name) for name in "abc"}, repeats=2)
    assert calls == list("abcabcabc")
    assert results == {"a": [3, 6], "b": [4, 7], "c": [5, 8]}


def test_measure_takes_the_clock_around_each_call() -> None:
    clock = fake_clock(0, 100, 1, 3, 10, 17, 20, 25)  # warm-up of 100 s, then 2, 7 and 5 s
    assert measure({"only": lambda: None}, 3, clock) == {"only": Spread(median=5, low=2, high=7)}


def test_a_candidate_may_take_its_own_time() -> None:
    own = iter([99.0, 4.0, 1.0, 3.0])
    assert measure({"only": lambda: next(own)}, 3) == {"only": Spread(median=3, low=1, high=4)}


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats is 0"):
        measure({"only": lambda: None}, 0)


def test_a_rate_is_low_where_the_time_is_high() -> None:
    assert Spread(median=2, low=1, high=4).rate(100) == Spread(median=50, low=25, high=100)


def test_ratios_follow_from_rows() -> None:
    ours = row("case", "ours", Spread(median=6, low=5, high=7), "things/s", bins=11, bound=10)
    theirs = row("case", "theirs", Spread(median=2, low=2, high=2), "things/s")
    found = ratio("figure", ours, theirs)
    assert (found.value, found.numerator, found.denominator) == (3, "case/ours", "case/theirs")
    counted = count_ratio("bins_vs_bound", ours, "bins", "bound")
    assert (counted.value, counted.numerator, counted.denominator) == (1.1, "case/ours:bins", "case/ours:bound")


def test_an_absent_peer_has_a_row_and_a_figure_but_no_number() -> None:
    ours = row("case", "ours", Spread(median=6, low=5, high=7), "things/s")
    peer = absent("case", "peer", "things/s")
    assert (peer.value, peer.median, peer.low, peer.high) == (None, None, None, None)
    assert ratio("figure", ours, peer).value is None


def test_the_json_is_one_object_of_environment_rows_and_ratios() -> None:
    ours = row("case", "ours", Spread(median=6, low=5, high=7), "things/s", bins=11)
    peer = absent("case", "peer", "things/s")
    report = Report(environment=environment(("peer",)), rows=(ours, peer), ratios=(ratio("figure", ours, peer),))
    found = json.loads(report.to_json())
    assert list(found) == ["environment", "rows", "ratios"]
    assert {"date", "command", "cpu", "cores", "python", "versions", "threads"} <= set(found["environment"])
    assert found["environment"]["versions"]["peer"] is None
    assert found["environment"]["versions"]["numpy"]
    measured = {"value": 6, "unit": "things/s", "median": 6, "low": 5, "high": 7, "counts": {"bins": 11}, "note": ""}
    assert found["rows"][0] == {"case": "case", "candidate": "ours", **measured}
    assert found["rows"][1]["value"] is None
    expected = {"figure": "figure", "value": None, "numerator": "case/ours", "denominator": "case/peer"}
    assert found["ratios"] == [expected]


def test_the_json_holds_no_numbers_that_json_has_not() -> None:
    endless = row("case", "ours", Spread(median=float("inf"), low=1, high=1), "things/s")
    with pytest.raises(ValueError, match="JSON"):
        Report(environment={}, rows=(endless,), ratios=()).to_json()


def test_the_tables_name_what_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    ours = row("case", "ours", Spread(median=6e6, low=5e6, high=7e6), "things/s", bins=1234)
    peer = absent("case", "peer", "things/s")
    show(Report(environment={}, rows=(ours, peer), ratios=(ratio("figure", ours, peer),)), Console(width=120))
    printed = capsys.readouterr().out
    assert "6.0 M" in printed
    assert "bins 1,234" in printed
    assert printed.count("absent") == 4  # value, low and high of the row, and the ratio


@pytest.mark.parametrize(
    ("value", "words"), [(12, "12"), (1_234_567, "1,234,567"), (0.00123456, "0.001235"), (12_345.0, "12.3 K")]
)
def test_quantities_are_short(value: float, words: str) -> None:
    assert quantity(value) == words


def test_peers_are_all_known_ones_unless_some_are_named() -> None:
    assert chosen_peers(("a", "b"), ()) == ("a", "b")
    assert chosen_peers(("a", "b"), ("b",)) == ("b",)
    with pytest.raises(ValueError, match="against is c: the peers are a, b"):
        chosen_peers(("a", "b"), ("c",))


def test_the_cpu_is_named_as_the_kernel_names_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Brand 7: x\nprocessor\t: 1\nmodel name\t: Brand 7: x\n")
    assert cpu_model(cpuinfo) == "Brand 7: x"
    assert cpu_model(tmp_path / "missing")


def test_results_add_up() -> None:
    one = Results(rows=(absent("case", "a", "s"),))
    two = Results(rows=(absent("case", "b", "s"),))
    assert [r.candidate for r in (one + two).rows] == ["a", "b"]
