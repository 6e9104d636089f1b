"""`Fleet`: one loader process on every node of a Ray cluster. Ray places and restarts them; it never carries batches.

    ray.init(address="auto")
    with Fleet(settings, keys="/shared/keys") as fleet:
        where = fleet.endpoint()  # goes to the ranks with whatever starts them
        ...
    Loader(endpoint=where, rank=3, keys="/shared/keys")  # in a rank: reads from the loader of its own node

Each loader process belongs to an actor, which starts it again when it dies; Ray starts the actor again, on another node
where its own is gone. All loaders plan the same job alike, so a rank goes on at whichever is left. The data, and the
folder of keys, must be at the same path on every node. The actors belong to the process that made the fleet, and end
with it. Nodes that join later get no loader.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.fleet.keeper import Keeper
from seqmesh.loader.fleet.places import Place, endpoint_of
from seqmesh.loader.keys import check_keys
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import START_SECONDS
from seqmesh.loader.settings import LoaderSettings

NAMESPACE = "seqmesh"  # of the actors' names
RESTARTS = 100  # of each loader process, until its actor is started again
ANSWER_SECONDS = 2.0  # within which an actor says where its loader is, or counts as gone for now
OWN_SECONDS = 10.0  # the same for a rank's own, which Ray may be starting again, most likely on the same node
PLACING_SECONDS = 30.0  # for Ray to find room for an actor, and to start its process
STOP_SECONDS = 10.0  # for all loaders to end by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCluster:
    """Says where a rank's loader is, in a process that is connected to the fleet's Ray cluster; for
    `Loader(endpoint=...)`. Asks the actor of `node` (by default: of the node that it is called on), which is given
    `OWN_SECONDS` to come back, and then all others, so it works as long as any lives. nodes: ids of those that have a
    loader."""

    fleet: str
    nodes: tuple[str, ...]
    node: str = ""

    def __call__(self) -> str:
        """Raises LookupError where no loader lives, RuntimeError where this process is not connected."""
        ray = connected_ray()
        node = self.node or ray.get_runtime_context().get_node_id()
        own = [each for each in self.nodes if each == node]
        said = _ask(ray, self._actors(ray, own), OWN_SECONDS)
        with contextlib.suppress(LookupError):
            return endpoint_of([*said.values()], node=node)
        said |= _ask(ray, self._actors(ray, [each for each in self.nodes if each != node]), ANSWER_SECONDS)
        return endpoint_of([said[each] for each in self.nodes if each in said], node=node)

    def _actors(self, ray: Any, nodes: Sequence[str]) -> dict[str, Any]:
        actors = {}
        for node in nodes:
            with contextlib.suppress(ValueError):  # there is none of the name any more
                actors[node] = ray.get_actor(_name(self.fleet, node), namespace=NAMESPACE)
        return actors


class Fleet:
    """`nodes`: ids of the nodes that have a loader.

    keys: folder of `seqmesh keys`, at the same path on every node; without it no loader can be reached from another
    machine. nodes: ids or addresses; by default all that have what a loader needs. num_cpus, resources: what Ray is to
    set aside for a loader. port: at which the first node's loader listens for other machines, the second's at the next,
    and so on; 0: at free ones. restarts, standby, timeout: see `LoaderProcess`. options: see `ServeOptions`; where a
    loader moves to a node that has one, a fixed port for metrics is taken, and the newcomer refuses to start.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        *,
        keys: str | Path | None = None,
        nodes: Sequence[str] | None = None,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        port: int = 0,
        restarts: int = RESTARTS,
        standby: bool = False,
        options: ServeOptions | None = None,
        timeout: float = START_SECONDS,
    ) -> None:
        """Start the loaders, and wait until all serve. Raises ValueError for what can not be, LoaderError where a
        loader refuses, LoaderTimeoutError where one is not up in time, each naming the node; RuntimeError where this
        process is not connected to a Ray cluster."""
        ray = connected_ray()
        self._needs = {"CPU": float(num_cpus), **(resources or {})}
        self._hosts = chosen_nodes(ray.nodes(), nodes, self._needs)
        self.nodes = tuple(self._hosts)
        self._name = secrets.token_hex(4)
        self._actors: dict[str, Any] = {}
        self._last: dict[str, Place] = {}  # what was heard of each
        order = {
            "settings": settings.resolved(),  # draws a seed where there is none: once, not on every node
            "options": _with_keys(options or ServeOptions(), keys),
            "restarts": restarts,
            "standby": standby,
            "timeout": timeout,
        }
        try:
            for number, node in enumerate(self.nodes):
                self._actors[node] = self._start(ray, node, order | {"port": port + number if port else 0})
            self._await_all(ray, timeout + PLACING_SECONDS)
        except BaseException:
            self.close()
            raise

    def endpoint(self, node: str = "") -> FromCluster:
        """What says where the loader of a node (by default: of the node that it is called on) is, or another that
        lives. It can be sent to any process that is connected to the same cluster."""
        if node and node not in self.nodes:
            raise ValueError(f"node is {node!r}: has no loader; the fleet is on {', '.join(self.nodes)}")
        return FromCluster(fleet=self._name, nodes=self.nodes, node=node)

    def status(self) -> list[Place]:
        """Of each loader, in the order of `nodes`; takes `ANSWER_SECONDS` at most. One that does not answer is not
        alive, and otherwise as it was."""
        said = _ask(connected_ray(), self._actors, ANSWER_SECONDS)
        gone = "its actor does not answer: Ray may be starting it again"
        for node, last in self._last.items():
            self._last[node] = said.get(node) or replace(last, alive=False, trouble=gone)
        return [self._last[node] for node in self.nodes]

    def close(self) -> None:
        """End all loaders. Does nothing the second time, nor where the connection to the cluster, and with it every
        actor, has ended."""
        import ray

        actors, self._actors = self._actors, {}
        if not ray.is_initialized():
            return
        stopped = [actor.stop.remote() for node, actor in actors.items() if node in self._last]
        if stopped:
            ray.wait(stopped, num_returns=len(stopped), timeout=STOP_SECONDS)
        for actor in actors.values():
            ray.kill(actor)  # its loader, where it was not stopped in time, ends by itself

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, ray: Any, node: str, order: Mapping[str, Any]) -> Any:
        """An actor, on its node while that lives, and else on any."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = ray.remote(Keeper).options(
            name=_name(self._name, node),
            namespace=NAMESPACE,
            num_cpus=self._needs["CPU"],
            resources={name: amount for name, amount in self._needs.items() if name != "CPU"},
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        )
        return actor.remote(node, **order)

    def _await_all(self, ray: Any, seconds: float) -> None:
        """Wait until all loaders serve. Raises what `__init__` does."""
        deadline = time.monotonic() + seconds
        waiting = {actor.where.remote(): node for node, actor in self._actors.items()}
        while waiting:
            ready, _ = ray.wait([*waiting], timeout=max(0, deadline - time.monotonic()))
            if not ready:
                raise LoaderTimeoutError(self._too_late(next(iter(waiting.values())), seconds))
            node = waiting.pop(ready[0])
            try:
                place: Place = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                raise LoaderError(f"{self._called(node)}: its actor could not start: {error}") from error
            if not place.alive:
                raise LoaderError(f"{self._called(node)}: {place.trouble}")
            self._last[node] = place

    def _too_late(self, node: str, seconds: float) -> str:
        return (
            f"{self._called(node)}: its loader was not up within {seconds:g} s: either others have taken what it needs "
            f"there, {_words(self._needs)} (see `ray status`; num_cpus=0 asks for none), or the node is busy (timeout)"
        )

    def _called(self, node: str) -> str:
        return f"node {node[:8]} at {self._hosts[node]}"


def import_ray(what: str = "a fleet") -> Any:
    """Raises ModuleNotFoundError, saying what needs it, without it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} needs ray: pip install 'seqmesh[ray]'", name="ray") from error
    return ray


def connected_ray() -> Any:
    """Raises ModuleNotFoundError without Ray, RuntimeError where this process is connected to no cluster: by itself Ray
    would start one."""
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError("this process is connected to no Ray cluster: call ray.init(address=...) first")
    return ray


def chosen_nodes(
    found: Sequence[Mapping[str, Any]], wanted: Sequence[str] | None, needs: Mapping[str, float]
) -> dict[str, str]:
    """Ids and addresses of the nodes for loaders, of those that `ray.nodes()` has found. wanted: ids or addresses, None
    for all that have the resources `needs`. Raises ValueError naming a node that is not there or has not enough."""
    alive = {node["NodeID"]: node for node in found if node["Alive"]}
    hosts = {number: str(node["NodeManagerAddress"]) for number, node in alive.items()}
    lacking = {
        number: {name: need for name, need in needs.items() if node["Resources"].get(name, 0.0) < need}
        for number, node in alive.items()
    }
    if wanted is None:
        chosen = [number for number in sorted(alive, key=lambda each: (hosts[each], each)) if not lacking[number]]
        if not chosen:
            raise ValueError(f"no node of the cluster has {_words(needs)}: ask for less (num_cpus, resources)")
        return {number: hosts[number] for number in chosen}
    chosen = []
    for name in wanted:
        matching = [number for number in alive if name in (number, hosts[number]) and number not in chosen]
        if not matching:
            raise ValueError(f"nodes has {name!r}: no such node lives, of {', '.join(hosts.values())}")
        if lacking[matching[0]]:
            raise ValueError(f"nodes has {name!r}: it has not {_words(lacking[matching[0]])}; ask for less (num_cpus)")
        chosen.append(matching[0])
    return {number: hosts[number] for number in chosen}


def _ask(ray: Any, actors: Mapping[str, Any], seconds: float) -> dict[str, Place]:
    """What actors say in so many seconds, in any order."""
    asked = {actor.where.remote(): node for node, actor in actors.items()}
    if not asked:
        return {}
    ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=seconds)
    said = {}
    for each in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # it is gone for good
            said[asked[each]] = ray.get(each)
    return said


def _with_keys(options: ServeOptions, keys: str | Path | None) -> ServeOptions:
    """Raises ValueError for keys that can not be used here."""
    if keys is None:
        return options
    check_keys(Path(keys))
    return replace(options, keys=str(Path(keys).resolve()))


def _name(fleet: str, node: str) -> str:
    return f"fleet {fleet} {node}"


def _words(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
