"""A Ray cluster of two nodes on this machine, and what happens to a fleet and its ranks there, told in a line of JSON.

Run as `python -m tests.ray_cluster FOLDER SETTINGS` by `tests.ray_spaces`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.fleet import cluster as fleet_module
from seqmesh.loader.fleet.cluster import Fleet
from seqmesh.loader.fleet.places import Place, from_file
from seqmesh.loader.keys import create_keys
from seqmesh.loader.settings import LoaderSettings
from tests.serving import SECONDS, is_running, take, wait_until
from tests.support import settings_for

CREDIT = 2000  # bytes: a few batches
MEMORY = 80 << 20  # bytes of Ray's object store, which holds nothing of ours


def rank(where: Any, number: int, settings: LoaderSettings, keys: Path) -> Client:
    client = Client(where, rank=number, credit=CREDIT, timeout=60, keys=keys)
    client.subscribe(Position(Feed(settings).start))
    return client


def timed_take(client: Client, count: int) -> tuple[list[str], float]:
    begin = time.monotonic()
    return take(client, count), time.monotonic() - begin


def on(node: str) -> Any:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def read_some(where: Any, settings: LoaderSettings, keys: Path) -> tuple[str, list[str]]:
    """A rank that Ray runs: where it read, and the first batches of rank 1."""
    client = rank(where, 1, settings, keys)
    try:
        return client.endpoint, take(client, 4)
    finally:
        client.close()


class Occupant:
    """Takes a CPU."""

    def pid(self) -> int:
        return os.getpid()


def refusals(settings: LoaderSettings, nodes: list[str]) -> dict[str, str]:
    """What is said of fleets that can not be."""
    said = {}

    def note(what: str, **changes: Any) -> None:
        try:
            with Fleet(**{"settings": settings} | changes):
                said[what] = "it started"
        except (LoaderError, ValueError, RuntimeError) as error:
            said[what] = f"{type(error).__name__}: {error}"

    note("too many CPUs", num_cpus=9)
    note("too many CPUs of a node", nodes=[nodes[1]], num_cpus=2)
    note("no such node", nodes=["10.1.2.3"])
    note("no data", settings=settings_for(Path("/nowhere")), nodes=[nodes[1]])
    occupant = ray.remote(Occupant).options(num_cpus=1, scheduling_strategy=on(nodes[1])).remote()
    ray.get(occupant.pid.remote())
    fleet_module.PLACING_SECONDS = 0.5
    note("no room", nodes=[nodes[1]], timeout=1.0)
    fleet_module.PLACING_SECONDS = 30.0
    ray.kill(occupant)
    return said


def place_of(fleet: Fleet, node: str) -> Place:
    return next(place for place in fleet.status() if place.node == node)


def faults(cluster: Any, second: Any, nodes: list[str], settings: LoaderSettings, folder: Path) -> dict[str, Any]:
    """Two ranks read while their loaders are killed, and a node is removed."""
    found: dict[str, Any] = {"nodes": nodes}
    seen: set[int] = set()
    keys = folder / "keys"
    with Fleet(settings, keys=keys) as fleet:

        def note(what: str) -> None:
            places = {place.node: place for place in fleet.status()}
            seen.update(place.pid for place in places.values())
            found[what] = [{"local": places[n].local, "on": places[n].on, "pid": places[n].pid} for n in nodes]

        note("at first")
        task = ray.remote(read_some).options(num_cpus=0, scheduling_strategy=on(nodes[1]))
        found["rank on Ray"] = ray.get(task.remote(fleet.endpoint(), settings, keys), timeout=60)
        stranger = rank(place_of(fleet, nodes[1]).remote, 1, settings, keys)
        found["rank elsewhere"] = take(stranger, 4)
        stranger.close()
        clients = [rank(fleet.endpoint(nodes[n]), n, settings, keys) for n in range(len(nodes))]
        taken = [take(client, 5) for client in clients]
        found["read at"] = [client.endpoint for client in clients]

        os.kill(place_of(fleet, nodes[0]).pid, signal.SIGKILL)
        more, found["gap after a kill"] = timed_take(clients[0], 10)
        taken[0] += more
        note("after a kill")

        begin = time.monotonic()
        cluster.remove_node(second)
        more, found["gap after a removal"] = timed_take(clients[1], 10)
        taken[1] += more
        wait_until(lambda: place_of(fleet, nodes[1]).alive)
        found["back after"] = time.monotonic() - begin
        note("after a removal")
        found["then read at"] = clients[1].endpoint

        ray.kill(fleet._actors[nodes[1]])
        more, found["gap after an end"] = timed_take(clients[1], 10)
        taken[1] += more
        found["at last read at"] = clients[1].endpoint
        found["at last alive"] = [place.alive for place in fleet.status()]
        for number, client in enumerate(clients):
            taken[number] += take(client)
            client.close()
        found["digests"] = taken
        begin = time.monotonic()
    found["closed within"] = time.monotonic() - begin
    wait_until(lambda: not any(map(is_running, seen)))
    wait_until(lambda: not [*folder.glob("seqmesh-*")], seconds=1.0)
    return found


@contextlib.contextmanager
def fleet_command(folder: Path, settings: LoaderSettings, address: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`seqmesh fleet` once its file of endpoints is there."""
    (folder / "job.yaml").write_text(
        f"{{data: {settings.data}, tokens_per_step: {settings.tokens_per_step}, capacity: {settings.capacity}, "
        f"ranks: {settings.ranks}, epochs: 1}}"
    )
    endpoints = folder / "endpoints.json"
    arguments = ["--settings", folder / "job.yaml", "--address", address, "--endpoints", endpoints]
    command = [sys.executable, "-m", "seqmesh.tools.cli", "fleet", *map(str, arguments), "--keys", str(folder / "keys")]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": "160"}) as process:
        try:
            wait_until(lambda: endpoints.exists() or process.poll() is not None)
            yield process, endpoints
        finally:
            process.kill()


def foreground(folder: Path, settings: LoaderSettings, address: str) -> dict[str, Any]:
    """The command, a rank that knows nothing of Ray, a killed loader, and SIGTERM."""
    with fleet_command(folder, settings, address) as (process, endpoints):
        where = from_file(endpoints)
        client = rank(where, 0, settings, folder / "keys")
        taken, read_at = take(client, 5), client.endpoint
        (place,) = json.loads(endpoints.read_text())["loaders"]
        os.kill(place["pid"], signal.SIGKILL)
        taken += take(client)
        client.close()
        wait_until(lambda: json.loads(endpoints.read_text())["loaders"][0]["restarts"] == 1)
        pid = json.loads(endpoints.read_text())["loaders"][0]["pid"]
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=SECONDS)
    wait_until(lambda: not is_running(pid))
    return {
        "read at": read_at,
        "place": place,
        "digests": taken,
        "code": process.returncode,
        "output": output,
        "file is there": endpoints.exists(),
    }


def main(folder: Path, settings: LoaderSettings) -> None:
    create_keys(folder / "keys")
    cluster = Cluster()
    cluster.add_node(num_cpus=2, include_dashboard=False, object_store_memory=MEMORY)
    second = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    ray.init(address=cluster.address)
    first = ray.get_runtime_context().get_node_id()
    nodes = [first, *(node["NodeID"] for node in ray.nodes() if node["NodeID"] != first)]
    found: dict[str, Any] = {"refusals": refusals(settings, nodes)}
    found["faults"] = faults(cluster, second, nodes, settings, folder)
    ray.shutdown()
    found["command"] = foreground(folder, settings, cluster.address)
    wait_until(lambda: not [*folder.glob("seqmesh-*")])
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), LoaderSettings.from_json(sys.argv[2]))
