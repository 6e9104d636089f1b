"""Which loader of a fleet a rank reads from, and the file that says where they are."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.fleet.cluster import Fleet, FromCluster, chosen_nodes
from seqmesh.loader.fleet.places import Place, endpoint_of, from_file, read_places, write_places
from seqmesh.loader.keys import create_keys
from seqmesh.loader.machine import machine
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, digests_inline, free_port, take
from tests.support import long_tail, make_set, settings_for

HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def places_of(folder: Path, here: int | None) -> list[Place]:
    """Of three machines; `here`: which of them this is."""
    return [
        Place(
            node=f"node{number}",
            on=f"node{number}",
            host=host,
            machine=machine() if number == here else "another",
            local=f"ipc://{folder}/loader",
            remote=f"tcp://{host}:5555",
            pid=7,
            restarts=0,
            alive=True,
        )
        for number, host in enumerate(HOSTS)
    ]


def without(places: list[Place], *numbers: int) -> list[Place]:
    return [
        replace(place, alive=n not in numbers, trouble="it fell" * (n in numbers)) for n, place in enumerate(places)
    ]


def test_a_rank_reads_through_shared_memory_where_a_loader_is_on_its_machine(tmp_path: Path) -> None:
    places = places_of(tmp_path, here=1)
    assert endpoint_of(places) == f"ipc://{tmp_path}/loader"
    assert endpoint_of(places, node="node2") == f"ipc://{tmp_path}/loader"
    assert endpoint_of(places_of(tmp_path / "not_in_sight", here=1), node="node1") == "tcp://10.0.0.2:5555"


def test_of_several_loaders_on_a_machine_a_rank_reads_from_its_own(tmp_path: Path) -> None:
    places = [replace(place, machine=machine()) for place in places_of(tmp_path, here=None)]
    for number in range(3):
        (folder := tmp_path / str(number)).mkdir()
        places[number] = replace(places[number], local=f"ipc://{folder}/loader")
    for number in range(3):
        assert endpoint_of(places, node=f"node{number}") == f"ipc://{tmp_path}/{number}/loader"


@pytest.mark.parametrize("name", ["node1", "10.0.0.2"])
def test_elsewhere_a_rank_reads_from_the_loader_of_its_node_or_from_the_next_that_lives(
    tmp_path: Path, name: str
) -> None:
    places = places_of(tmp_path, here=None)
    assert endpoint_of(places, node=name) == "tcp://10.0.0.2:5555"
    assert endpoint_of(without(places, 1), node=name) == "tcp://10.0.0.3:5555"
    assert endpoint_of(without(places, 1, 2), node=name) == "tcp://10.0.0.1:5555"
    with pytest.raises(LookupError, match=r"no loader can be reached: node node0 at 10.0.0.1: it fell; node node1"):
        endpoint_of(without(places, 0, 1, 2), node=name)


def test_a_dead_loader_on_this_machine_is_not_read(tmp_path: Path) -> None:
    assert endpoint_of(without(places_of(tmp_path, here=0), 0)) == "tcp://10.0.0.2:5555"


def test_without_a_remote_address_a_loader_on_another_machine_is_out_of_reach(tmp_path: Path) -> None:
    places = [replace(place, remote="") for place in places_of(tmp_path, here=None)]
    with pytest.raises(LookupError, match="is on another machine, and listens on no other"):
        endpoint_of(places)
    with pytest.raises(LookupError, match="the fleet has none"):
        endpoint_of([])


def test_the_file_holds_all_places(tmp_path: Path) -> None:
    places, path = places_of(tmp_path, here=2), tmp_path / "endpoints.json"
    for written in (without(places, 2), places):
        write_places(path, written)
        assert read_places(path) == written
        assert from_file(path, "node0")() == endpoint_of(written, node="node0")
    assert [file.name for file in tmp_path.iterdir()] == ["endpoints.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2, "loaders": []}', '{"version": 1}', '{"version": 1, "loaders": [{"node": "x"}]}'],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/file is not a file of a fleet's endpoints: "):
        from_file(tmp_path / "file")()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "file")):
        from_file(tmp_path / "file")()
    with pytest.raises(FileNotFoundError):
        write_places(tmp_path / "nowhere" / "file", [])


def found(*, cpus: tuple[float, ...], dead: int | None = None) -> list[dict[str, Any]]:
    """What Ray says of nodes with so many CPUs, the highest address first."""
    nodes = [
        {"NodeID": f"id{n}", "NodeManagerAddress": f"10.0.0.{n}", "Alive": n != dead, "Resources": {"CPU": count}}
        for n, count in enumerate(cpus)
    ]
    return nodes[::-1]


def test_loaders_go_to_the_nodes_that_have_room_in_order_of_their_addresses() -> None:
    assert chosen_nodes(found(cpus=(0.0, 4.0, 4.0, 4.0), dead=2), None, {"CPU": 1.0}) == {
        "id1": "10.0.0.1",
        "id3": "10.0.0.3",
    }
    assert [*chosen_nodes(found(cpus=(0.0, 4.0)), None, {"CPU": 0.0})] == ["id0", "id1"]
    with pytest.raises(ValueError, match="no node of the cluster has 1 CPU, 2 loader: ask for less"):
        chosen_nodes(found(cpus=(4.0,)), None, {"CPU": 1.0, "loader": 2.0})


def test_nodes_are_named_by_id_or_address() -> None:
    nodes = found(cpus=(0.0, 4.0, 4.0), dead=2)
    assert [*chosen_nodes(nodes, ["10.0.0.1", "id0"], {"CPU": 0.0})] == ["id1", "id0"]
    with pytest.raises(ValueError, match=r"nodes has 'id2': no such node lives, of 10.0.0.1, 10.0.0.0"):
        chosen_nodes(nodes, ["id2"], {"CPU": 1.0})
    with pytest.raises(ValueError, match="nodes has 'id0': it has not 1 CPU"):
        chosen_nodes(nodes, ["id0"], {"CPU": 1.0})
    with pytest.raises(ValueError, match="nodes has 'id1'"):  # twice
        chosen_nodes(nodes, ["id1", "id1"], {"CPU": 1.0})


def test_nothing_starts_a_cluster_by_itself(settings: LoaderSettings) -> None:
    pytest.importorskip("ray")
    with pytest.raises(RuntimeError, match="this process is connected to no Ray cluster"):
        Fleet(settings)
    with pytest.raises(RuntimeError, match="this process is connected to no Ray cluster"):
        FromCluster(fleet="x", nodes=("id0",))()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), long_tail(200, 40)), ranks=2, capacity=48)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    create_keys(folder := tmp_path_factory.mktemp("keys") / "keys")
    return folder


@pytest.fixture(scope="module")
def both(settings: LoaderSettings, keys: Path) -> Iterator[tuple[LoaderProcess, str]]:
    """A loader process that listens at two addresses, and the second."""
    also = f"tcp://127.0.0.1:{free_port()}"
    with LoaderProcess(settings, restarts=1, options=ServeOptions(keys=str(keys), also=also)) as process:
        yield process, also


def test_one_loader_serves_its_machine_and_others(
    settings: LoaderSettings, keys: Path, both: tuple[LoaderProcess, str]
) -> None:
    process, also = both
    clients = [
        Client(endpoint, rank=rank, credit=2000, timeout=SECONDS, keys=keys)
        for rank, endpoint in enumerate((process.endpoint, also))
    ]
    assert [client.transport for client in clients] == ["shm", "zmq"]
    for client in clients:
        client.subscribe(Position(Feed(settings).start))
    taken = [take(client, 5) for client in clients]
    os.kill(process.pid, 9)  # it is back at both
    for rank, client in enumerate(clients):
        assert taken[rank] + take(client) == digests_inline(settings, rank)
        client.close()
    assert process.restarted == 1


def test_a_second_address_is_held_to_the_same_rules(settings: LoaderSettings, both: tuple[LoaderProcess, str]) -> None:
    with pytest.raises(LoaderError, match="any other tcp address needs keys"):
        LoaderProcess(settings, options=ServeOptions(also="tcp://0.0.0.0:5555"))
    with pytest.raises(LoaderError, match=f"{both[1]} can not be bound: Address already in use"):
        LoaderProcess(settings, options=ServeOptions(also=both[1]))


def test_places_are_plain_data(tmp_path: Path) -> None:
    assert json.loads(json.dumps([asdict(place) for place in places_of(tmp_path, here=0)]))[1]["host"] == "10.0.0.2"
