"""Workers on the nodes of a Ray cluster encode units; what they make comes back in the order of the units.

The same contract as `seqmesh.tools.units.crew`, whose processes are on one machine, but for a death: each worker is an
actor, which Ray starts again, on another node where its own is gone, and what it had goes to another worker meanwhile.
A unit gives the same bytes wherever and however often it is encoded, so a death is not seen in the output.

Workers read the files themselves, which must be at the same path on every node; what cannot be entered in the middle,
or is here alone (standard input), is read here and travels. Every node must have the same versions of what makes tokens
as this one.

At most AHEAD units a worker are under way, those that wait for their turn included. So this process and Ray's object
store on its node hold at most workers × AHEAD units and their tokens; a node's workers hold one unit each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from seqmesh.tools.cluster import connected
from seqmesh.tools.documents import stretch
from seqmesh.tools.inputs import InputFile
from seqmesh.tools.records import Reading
from seqmesh.tools.tokenizers.engines import build_engine
from seqmesh.tools.units.crew import AHEAD, Job, under_way, workers_for
from seqmesh.tools.units.cut import Unit
from seqmesh.tools.units.encoder import Encoded, Encoder

TRIES = 4  # of a unit, where its workers die
PLACING_SECONDS = 60.0  # for Ray to find room for at least one worker, and to start its process
MAKERS = ("seqmesh", "tokenizers", "tiktoken", "quicktok-v1", "sentencepiece")  # packages that decide about tokens


@contextmanager
def ray_crew(job: Job, files: Sequence[InputFile], *, workers: int | None, address: str) -> Iterator[RayCrew]:
    """Workers on the cluster at an address until the block ends; on the one that this process is connected to, if any.

    workers: None for one a CPU of the cluster, as far as the input goes round. Raises ModuleNotFoundError without Ray,
    ConnectionError where no cluster is at the address, ValueError for files in this process's memory.
    """
    for file in files:
        if _is_private(file) and file.kind != "jsonl":
            raise ValueError(f"{file.shown} is in the memory of this process, which no other node reads: use on=local")
    with connected(address, what="preparing on a cluster", logs=False) as ray:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        crew = RayCrew(ray, job, workers_for(files, workers, cpus))
        try:
            yield crew
        finally:
            crew.close()


class RayCrew:
    """Workers until `close`. Each takes a CPU of its node and some 250 MB; those for which no node has room yet get
    their first unit once one has."""

    def __init__(self, ray: Any, job: Job, workers: int) -> None:
        """ray: the module, connected."""
        self._ray = ray
        self._job = ray.put(job)  # kept: a worker that is started again needs it
        self.workers, ours = workers, versions()
        self._lanes = [_Lane(ray, [self._job], ours) for _ in range(workers)]

    def close(self) -> None:
        for lane in self._lanes:
            self._ray.kill(lane.actor)

    def encode(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Encoded]]:
        """Each unit with what became of it, in order. An error in `units` is raised once all before it are done.

        Raises what a worker raised, when its unit's turn comes, naming the node where a file is not seen there;
        ChildProcessError naming a unit whose workers died TRIES times; TimeoutError where no node has room for any
        worker; RuntimeError where a worker cannot be what it must.
        """
        for tasks in under_way(units, lambda: AHEAD * len(self._ready()), self._give):
            self._settle(tasks)
            task = tasks.popleft()
            yield task.given, task.outcome.result()

    def _give(self, unit: Unit) -> _Task:
        task = _Task(unit)
        self._submit(task)
        return task

    def _settle(self, tasks: Sequence[_Task]) -> None:
        """Wait until the first unit is done. Units whose worker dies meanwhile are given to another."""
        first = tasks[0]
        while not first.outcome.done():
            waiting = {task.ref: task for task in tasks if not task.outcome.done()}
            done, _ = self._ray.wait([*waiting], num_returns=1)
            for ref in done:
                self._take(waiting[ref])

    def _take(self, task: _Task) -> None:
        """What came of a task: tokens, an error for its turn, or nothing, because the worker or its node died."""
        errors = self._ray.exceptions
        task.lane.load -= 1
        try:
            result = self._ray.get(task.ref)
            if isinstance(result, Exception):
                task.outcome.set_exception(result)
            else:
                task.outcome.set_result(result)
        except errors.RayTaskError as error:
            task.outcome.set_exception(RuntimeError(f"a worker failed at {task.unit}: {error.cause!r}"))
        except errors.RayError as error:
            task.lane.look()
            task.deaths += 1
            if task.deaths < TRIES:
                self._submit(task)
            else:
                task.outcome.set_exception(_died(task.unit, error))

    def _submit(self, task: _Task) -> None:
        task.lane = min(self._ready(), key=lambda lane: lane.load)
        task.lane.load += 1
        task.ref = task.lane.encode(task.unit)

    def _ready(self) -> list[_Lane]:
        """The workers that run, at least one: waits for it."""
        lanes = {lane.up: lane for lane in self._lanes}
        done, _ = self._ray.wait([*lanes], num_returns=len(lanes), timeout=0)
        if not done:
            done, _ = self._ray.wait([*lanes], num_returns=1, timeout=PLACING_SECONDS)
        if not done:
            raise TimeoutError(
                f"no worker was up within {PLACING_SECONDS:g} s: a worker needs a CPU of a node, and others have taken "
                "them all (see `ray status`), or the nodes are busy"
            )
        return [lanes[ref].checked() for ref in done]


class _Task:
    """A unit under way, as it was given and as it travels; with whom it is; and, once it is known, what came of it."""

    lane: _Lane
    ref: Any

    def __init__(self, given: Unit) -> None:
        """Raises ValueError or OSError where what travels cannot be read."""
        self.given = given
        self.unit = travelling(given)
        self.deaths = 0
        self.outcome: Future[Encoded] = Future()


class _Lane:
    """One worker. up: Ray's reference to its word that it runs. load: how many units it has not finished."""

    up: Any

    def __init__(self, ray: Any, job: list[Any], ours: dict[str, str]) -> None:
        """job: Ray's reference to it, in a list, in which it travels as one."""
        # Units are not tried again by Ray: it would keep them for a worker for which there may be no room any more.
        options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        self.actor = ray.remote(_Worker).options(**options).remote()
        self.load = 0
        self._job = job
        self._ours = ours
        self._ray = ray
        self._fit = False
        self.look()

    def look(self) -> None:
        """Have it say when it runs, or runs again."""
        self.up = self.actor.check.options(max_task_retries=-1).remote(self._job, self._ours)
        self._fit = False

    def encode(self, unit: Unit) -> Any:
        """Ray's reference to what will come of a unit."""
        return self.actor.encode.remote(self._job, unit)

    def checked(self) -> _Lane:
        """Raises RuntimeError where it has said that it cannot work."""
        if not self._fit:
            try:
                self._ray.get(self.up)
            except self._ray.exceptions.RayTaskError as error:
                raise RuntimeError(f"a worker cannot start: {error.cause}") from error
            except self._ray.exceptions.RayError as error:
                raise RuntimeError(f"a worker cannot start: {error}") from error
            self._fit = True
        return self


class _Worker:
    """What is on the other side, in a process of its own."""

    def __init__(self) -> None:
        self._encoder: Encoder | None = None

    def check(self, job: list[Any], ours: dict[str, str]) -> None:
        """Raises RuntimeError, naming the node, where this one would not make the same tokens as others."""
        here = versions()
        wrong = [f"{name} {here.get(name, 'not at all')}" for name in ours if here.get(name) != ours[name]]
        if wrong:
            needed = ", ".join(f"{name} {number}" for name, number in ours.items())
            raise RuntimeError(f"{_node()} has {', '.join(wrong)}: install the same on every node ({needed})")
        self._encoder_for(job)

    def encode(self, job: list[Any], unit: Unit) -> Encoded | Exception:
        """Errors that are for the user are returned: Ray prints those that are raised and never asked for."""
        try:
            _look_at_files(unit)
            return self._encoder_for(job).encode(unit)
        except OSError as error:
            return OSError(f"{_node()} cannot read {unit}: {error}; every node must see the inputs")
        except ValueError as error:
            return error

    def _encoder_for(self, sent: list[Any]) -> Encoder:
        """Made once."""
        import ray

        if self._encoder is None:
            job: Job = ray.get(sent[0])
            engine = build_engine(job.tokenizer, job.engine, threads=1)
            self._encoder = Encoder(job.tokenizer, engine, job.filters, job.template)
        return self._encoder


def versions() -> dict[str, str]:
    """Of the packages that decide about tokens, as far as they are here."""
    found = {}
    for name in MAKERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _is_private(file: InputFile) -> bool:
    """Whether no other machine can have a file: it is in this process's memory, or it is open here without a name."""
    return isinstance(file.filesystem, MemoryFileSystem) or file.path.startswith("/proc/")


def travelling(unit: Unit) -> Unit:
    """A unit with the bytes of what no other node can read."""
    return replace(unit, readings=tuple(_with_data(reading) for reading in unit.readings))


def _with_data(reading: Reading) -> Reading:
    if reading.data is not None or not _is_private(reading.file):
        return reading
    offset, data = stretch(reading)
    return replace(reading, start=replace(reading.start, offset=offset), data=data)


def _look_at_files(unit: Unit) -> None:
    """A path may lead to another file here. Raises OSError."""
    for reading in unit.readings if unit.records is None else ():
        file = reading.file
        if reading.data is None and isinstance(file.filesystem, LocalFileSystem):
            size = os.stat(file.path).st_size
            if size != file.size:
                raise OSError(f"{file.shown} has {size} bytes here, {file.size} where the run was started")


def _node() -> str:
    import ray

    return f"node {ray.get_runtime_context().get_node_id()[:8]} at {ray.util.get_node_ip_address()}"


def _died(unit: Unit, error: Exception) -> ChildProcessError:
    return ChildProcessError(
        f"{TRIES} times a worker died that had {unit}, or was to have it next: killed, out of memory, or its node was "
        f"lost. Finished shards are kept, the same command goes on after them. Ray says: {error}"
    )
