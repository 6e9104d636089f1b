"""A fleet on a Ray cluster of two nodes; what goes on there is in `tests.ray_cluster`, run once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.settings import LoaderSettings
from tests.ray_spaces import short_folder, told_by
from tests.serving import digests_inline
from tests.support import long_tail, make_set, settings_for

GAP_SECONDS = 20.0  # without a batch, at most; they are printed
CLOSE_SECONDS = 10.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def settings(folder: Path) -> LoaderSettings:
    return settings_for(make_set(folder / "set", long_tail(300, 40)), ranks=2, capacity=48).resolved()


@pytest.fixture(scope="module")
def found(folder: Path, settings: LoaderSettings) -> dict[str, Any]:
    return told_by("tests.ray_cluster", folder, settings.to_json())


@pytest.fixture(scope="module")
def faults(found: dict[str, Any]) -> dict[str, Any]:
    return dict(found["faults"])


@pytest.fixture(scope="module")
def every(settings: LoaderSettings) -> list[list[str]]:
    return [digests_inline(settings, rank) for rank in range(2)]


def test_each_node_has_a_loader_that_its_ranks_read_from(faults: dict[str, Any], every: list[list[str]]) -> None:
    assert [place["on"] for place in faults["at first"]] == faults["nodes"]
    assert faults["read at"] == [place["local"] for place in faults["at first"]]
    where, digests = faults["rank on Ray"]
    assert where == faults["at first"][1]["local"]
    assert digests == faults["rank elsewhere"] == every[1][: len(digests)]


def test_streams_are_exact_whatever_happens_to_loaders_and_nodes(
    faults: dict[str, Any], every: list[list[str]]
) -> None:
    assert faults["digests"] == every
    seconds = {
        name: faults[name] for name in ("gap after a kill", "gap after a removal", "back after", "gap after an end")
    }
    print(", ".join(f"{name}: {value:.2f} s" for name, value in seconds.items()))
    assert max(seconds.values()) < GAP_SECONDS


def test_a_killed_loader_is_started_again_on_its_node(faults: dict[str, Any]) -> None:
    before, after = faults["at first"], faults["after a kill"]
    assert before[0]["pid"] != after[0]["pid"]
    assert before[0] | {"pid": 0} == after[0] | {"pid": 0}
    assert before[1] == after[1]


def test_the_loader_of_a_removed_node_moves_to_the_other(faults: dict[str, Any]) -> None:
    before, after = faults["after a kill"], faults["after a removal"]
    assert [place["on"] for place in after] == [faults["nodes"][0]] * 2
    assert before[0] == after[0]
    assert before[1]["local"] != after[1]["local"] == faults["then read at"]


def test_a_rank_whose_loader_is_gone_for_good_reads_from_another(faults: dict[str, Any]) -> None:
    assert sorted(faults["at last alive"]) == [False, True]
    assert faults["at last read at"] == faults["after a removal"][0]["local"]


def test_closing_takes_a_moment(faults: dict[str, Any]) -> None:
    assert faults["closed within"] < CLOSE_SECONDS  # that nothing is left is waited for where it runs


def test_a_fleet_that_can_not_be_says_where_and_why(found: dict[str, Any]) -> None:
    nodes, said = found["faults"]["nodes"], found["refusals"]
    second = f"node {nodes[1][:8]} at 127.0.0.1"
    assert said["too many CPUs"].startswith("ValueError: no node of the cluster has 9 CPU: ask for less")
    assert said["too many CPUs of a node"].startswith(f"ValueError: nodes has '{nodes[1]}': it has not 2 CPU")
    assert said["no such node"].startswith("ValueError: nodes has '10.1.2.3': no such node lives, of 127.0.0.1")
    assert said["no data"].startswith(f"LoaderError: {second}: the loader process ended with exit code 2: /nowhere")
    assert said["no room"].startswith(f"LoaderTimeoutError: {second}: its loader was not up within 1.5 s: either")
    assert "num_cpus=0" in said["no room"]


def test_the_command_serves_ranks_that_know_nothing_of_ray(found: dict[str, Any], every: list[list[str]]) -> None:
    command = found["command"]
    assert command["digests"] == every[0]
    assert command["read at"] == command["place"]["local"]
    assert command["code"] == 143
    assert not command["file is there"]
    assert 'Loader(endpoint=from_file("' in command["output"] and 'keys="' in command["output"]
    assert command["place"]["local"] in command["output"] and command["place"]["remote"] in command["output"]
    assert f"node {command['place']['node'][:8]}: serves on node" in command["output"]  # after the kill
