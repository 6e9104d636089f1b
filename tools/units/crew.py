"""Several processes encode units; what they make comes back in the order of the units.

Each worker is a lane: a pool of one process, so that where it dies, the unit it had is known. Workers are spawned,
never forked: a tokenizer's threads would not survive that. A worker uses one thread, ignores Ctrl-C (the process that
started it hears it, too) and ends with that process, however that ends. Nothing is shared: units and what is made of
them are sent.

At most AHEAD units a worker are under way, those that wait for their turn included; so memory is bounded by
workers × AHEAD units and their tokens, whichever unit is slow.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self, TypeVar

from fsspec.implementations.memory import MemoryFileSystem

from seqmesh.tools.chat.template import ChatTemplate
from seqmesh.tools.inputs import InputFile
from seqmesh.tools.tokenizers.engines import build_engine
from seqmesh.tools.tokenizers.file import TokenizerFile
from seqmesh.tools.units.cut import UNIT_BYTES, Unit
from seqmesh.tools.units.encoder import Encoded, Encoder
from seqmesh.tools.units.filters import Filters

AHEAD = 2
MIN_UNITS = 4  # for each worker

Task = TypeVar("Task")  # a unit under way
Encode = Callable[[Iterable[Unit]], Iterator[tuple[Unit, Encoded]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs to make an encoder of its own."""

    tokenizer: TokenizerFile
    engine: str  # its name, as it was proved
    filters: Filters
    template: ChatTemplate | None = None


def workers_for(files: Sequence[InputFile], wanted: int | None, cores: int | None = None) -> int:
    """How many processes are to encode the files, 1 meaning this one.

    None: one a core (by default: of this machine), but none for less than MIN_UNITS units: starting it would take
    longer than the work. Files in this process's memory cannot be read by others.
    """
    if any(isinstance(file.filesystem, MemoryFileSystem) for file in files):
        return 1
    units = sum(file.size for file in files) // UNIT_BYTES
    return wanted or max(1, min(cores or len(os.sched_getaffinity(0)), units // MIN_UNITS))


class Crew(AbstractContextManager["Crew"]):
    """Workers until the block ends. One worker more costs a process with a tokenizer: some 200 MB."""

    def __init__(self, job: Job, workers: int) -> None:
        self._lanes = [_Lane(job) for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for lane in self._lanes:
                stack.callback(lane.pool.shutdown, cancel_futures=True)

    def encode(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Encoded]]:
        """Each unit with what became of it, in order. An error in `units` is raised once all before it are done.

        Raises what a worker raised, when its unit's turn comes; ChildProcessError naming the unit where one died.
        """
        for tasks in under_way(units, lambda: AHEAD * len(self._lanes), self._give):
            unit, lane, future = tasks.popleft()
            yield unit, lane.result(unit, future)

    def _give(self, unit: Unit) -> tuple[Unit, _Lane, Future[Encoded]]:
        lane = min(self._lanes, key=_Lane.load)
        return unit, lane, lane.submit(unit)


def under_way(units: Iterable[Unit], most: Callable[[], int], give: Callable[[Unit], Task]) -> Iterator[deque[Task]]:
    """Give out units as long as fewer than `most` are under way, and hand over those that are, in order: whoever
    iterates takes the first away. An error in `units` or of `give` is raised once all before it are taken."""
    source = iter(units)
    tasks: deque[Task] = deque()
    failure: Exception | None = None
    while True:
        while failure is None and len(tasks) < most():
            try:
                unit = next(source, None)
                if unit is None:
                    break
                tasks.append(give(unit))
            except Exception as error:
                failure = error
        if not tasks:
            break
        yield tasks
    if failure:
        raise failure


class _Lane:
    """One worker."""

    def __init__(self, job: Job) -> None:
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start, initargs=(job,))
        self._given: deque[tuple[Unit, Future[Encoded]]] = deque()

    def load(self) -> int:
        """How many units it has not finished."""
        while self._given and self._given[0][1].done() and not _died(self._given[0][1]):
            self._given.popleft()
        return len(self._given)

    def submit(self, unit: Unit) -> Future[Encoded]:
        try:
            future = self.pool.submit(_encode, unit)
        except BrokenProcessPool as error:  # it died since; told when the unit's turn comes
            future = Future()
            future.set_exception(error)
        self._given.append((unit, future))
        return future

    def result(self, unit: Unit, future: Future[Encoded]) -> Encoded:
        try:
            return future.result()
        except BrokenProcessPool as error:
            self.load()
            had = self._given[0][0] if self._given else unit
            raise ChildProcessError(
                f"a worker died while it had {had}: killed, or out of memory. Finished shards are kept, the same "
                "command goes on after them; fewer --workers need less memory"
            ) from error


def _died(future: Future[Encoded]) -> bool:
    return isinstance(future.exception(), BrokenProcessPool)


# Of a worker's process alone: the one thing that its calls share.
_encoder: list[Encoder] = []


def _start(job: Job) -> None:
    """Before a worker's first unit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    engine = build_engine(job.tokenizer, job.engine, threads=1)
    _encoder.append(Encoder(job.tokenizer, engine, job.filters, job.template))


def _end_with_parent() -> None:
    """A pool's process waits for work for ever where the process that would give it is killed."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode(unit: Unit) -> Encoded:
    return _encoder[0].encode(unit)
