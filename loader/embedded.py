"""`Loader`: packed batches as torch tensors, in any training loop.

    settings = LoaderSettings(data="shards", tokens_per_step=65536, capacity=8192)
    with Loader(settings) as loader:
        for batch in loader: ...

It starts the loader process by itself (one for a machine: under torch.distributed the machine's first rank starts it
and the others connect), or connects to one that runs (`endpoint=`), or reads in this process (`mode="inline"`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from torch.utils.data import IterableDataset, get_worker_info

from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.exchange import exchange_texts
from seqmesh.loader.feed import Delivery, Feed, Position
from seqmesh.loader.inline import Inline, Source
from seqmesh.loader.order import ServeOptions
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.storage.cache import Cache
from seqmesh.loader.stream import StreamState
from seqmesh.loader.tensors import TensorMaker, TorchBatch

STATE_VERSION = 1
CREDIT_BYTES = 64 << 20
RESTARTS = 3
REMEMBERED_STEPS = 64  # ends of steps, for loops that read ahead of what they have trained


class Loader(IterableDataset[TorchBatch]):
    """Iterates the `PackedBatch`es of one rank. Every step gives every rank at least one batch (of no tokens where the
    rank has no documents); `batch.last_in_step` says when to reduce and update.

    settings may be None with `endpoint`: the running loader knows them. endpoint: an address, or a callable that says
    where the loader is now, and is asked again when it is not heard: see `Client`. rank: by default
    torch.distributed's, else 0. peer, peers: where several processes hold one replica together (tensor and pipeline
    parallel), which of them this is: all get the same batches, which are read, gathered and kept in memory once.
    timeout: seconds to wait for the loader, at start and for each batch. credit_bytes: batches read ahead, in bytes:
    the size of the rank's ring. transport: `shm`, `zmq`, or `auto` for shared memory where the loader is on this
    machine. keys: folder of keys for a loader on another machine. restarts: how often a loader process that this Loader
    started, and that dies, is started again (0: never); all ranks of the machine go on at their exact next batch.
    standby: a second loader process waits to take over. options: see `ServeOptions`. log: file for the loader process's
    log.

    Tensors are copies, safe to keep. views: instead, the token fields are read-only int32 views of shared memory (on
    the CPU; a GPU gets its copy in any case); the memory is used again when the last tensor over it is gone, and a rank
    that keeps too many gets a CreditError at the deadline, never another batch's tokens.
    wait_seconds: time spent waiting so far. vocab_size: ids that the shards' tokenizer has.

    Iterating again goes on where the iteration stands, after the end with nothing: `epochs` are the settings'. Inside a
    DataLoader (torch's, or torchdata's stateful one) it needs `batch_size=None, num_workers=0`: it reads ahead by
    itself. It can not be pickled or copied.
    """

    def __init__(
        self,
        settings: LoaderSettings | None = None,
        *,
        rank: int | None = None,
        peer: int = 0,
        peers: int = 1,
        mode: Literal["process", "inline"] = "process",
        endpoint: str | Callable[[], str] | None = None,
        transport: Literal["auto", "shm", "zmq"] = "auto",
        keys: str | Path | None = None,
        device: torch.device | str = "cpu",
        views: bool = False,
        timeout: float = 120.0,
        credit_bytes: int = CREDIT_BYTES,
        restarts: int = RESTARTS,
        standby: bool = False,
        options: ServeOptions | None = None,
        log: str | Path | None = None,
    ) -> None:
        """Raises ValueError for settings that do not fit together, LoaderError where the loader refuses. Under
        torch.distributed every rank must make one, at the same time: they agree on the endpoint, and on a seed where
        none was set."""
        if credit_bytes < 1:
            raise ValueError(f"credit_bytes is {credit_bytes}: must be at least 1")
        self.rank = _own_rank() if rank is None else rank
        self.wait_seconds = 0.0
        self._make = TensorMaker(torch.device(device), views=views)
        self._process: LoaderProcess | None = None
        self._source: Source
        if settings is not None and endpoint is None:
            settings = self._with_seed(settings)
        if mode == "inline":
            self._open_inline(settings, options or ServeOptions())
        else:
            if endpoint is None:
                start = partial(
                    LoaderProcess,
                    timeout=timeout,
                    restarts=restarts,
                    standby=standby,
                    options=options,
                    log=None if log is None else Path(log),
                )
                endpoint = self._own_endpoint(settings, start)
            connect = partial(
                Client,
                endpoint,
                rank=self.rank,
                peer=peer,
                peers=peers,
                credit=credit_bytes,
                timeout=timeout,
                transport=transport,
                keys=None if keys is None else Path(keys),
            )
            self._open_client(settings, connect)
        self._opener = os.getpid()
        self._steps: int | None = None  # of the job, once they are counted
        self._ends: deque[StreamState] = deque(maxlen=REMEMBERED_STEPS)  # of the newest steps
        self._go_to(Position(self._start), None)

    def __iter__(self) -> Iterator[TorchBatch]:
        if get_worker_info() is not None and os.getpid() != self._opener:
            raise LoaderError(
                f"rank {self.rank}: a Loader is iterated in a worker of a DataLoader: set num_workers to 0; its own "
                "process reads ahead already"
            )
        return self._batches()

    def _batches(self) -> Iterator[TorchBatch]:
        while (delivery := self._next()) is not None:
            batch = delivery.batch.map(self._make.tensor)
            del delivery  # or it would hold the memory that it was copied from
            yield batch
            del batch  # it is the user's now, to keep or to let go of

    @property
    def steps(self) -> int:
        """Global batches of the whole job, all epochs, for any number of ranks: exactly as many as are delivered. The
        loader counts them without planning or reading; this waits for it, within the timeout, and remembers.

        Raises ValueError where the job has no end, LoaderTimeoutError where counting takes too long: ask again then.
        """
        if self._steps is None:
            self._steps = self._source.count_steps(self._origin)
        return self._steps

    def __len__(self) -> int:
        """Batches that this rank gets in the whole job. Only batching `rows` knows without planning every step: raises
        TypeError otherwise, and where the job has no end."""
        rows = self.settings.rows_per_step
        if rows is None:
            raise TypeError(
                "a Loader of batching 'tokens' has no len: how many batches a step has is planned when its turn comes; "
                "`steps` says how many steps there are"
            )
        try:
            return self.steps * (rows // self.settings.ranks)
        except ValueError as error:
            raise TypeError(f"this Loader has no len: {error}") from error

    def __bool__(self) -> bool:
        return True  # as any object: not a matter of len

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Loader can not be pickled or copied: open one in the process that uses it, and set num_workers to 0 "
            "where it is inside a DataLoader"
        )

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where the iteration stands: after the last batch it gave, however many were read ahead. Plain JSON.

        At a step's end it is good for any number of ranks; inside a step only for the same mesh. step: instead, after
        so many global batches, for a loop that takes batches before it trains on them; the ends of the last
        REMEMBERED_STEPS steps are known. Raises ValueError for another.
        """
        position = self._position if step is None else Position(self._end_of(step))
        return {
            "version": STATE_VERSION,
            "stream": position.state.to_dict(),
            "wave": position.wave,
            "plan": self._plan if position.wave > 0 else None,
            "order": self.settings.order(),
            "data": self._data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken. Raises ValueError naming what differs from this loader."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"loader state has version {state.get('version')}: this seqmesh reads {STATE_VERSION}")
        ours = self.settings.order() | {"data": self._data}
        theirs = state["order"] | {"data": state["data"]}
        if differing := [n for n in ours if theirs.get(n) != ours[n]]:
            words = "; ".join(f"{n} was {theirs.get(n)}, is {ours[n]}" for n in differing)
            raise ValueError(f"the state is of another sequence of batches: {words}")
        self._go_to(Position(StreamState.from_dict(state["stream"]), state["wave"]), state["plan"])

    def close(self) -> None:
        """Leave the loader, and end its process if this Loader started it."""
        self._source.close()
        if self._process:
            self._process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _go_to(self, position: Position, plan: str | None) -> None:
        """plan: of the step that the position is inside of."""
        self._position, self._plan = position, plan
        self._origin = position.state
        self._steps = None
        self._ends.clear()
        if position.wave == 0:
            self._ends.append(position.state)
        self._subscribed = False

    def _end_of(self, step: int) -> StreamState:
        known = [state.step for state in self._ends]
        if step not in known:
            words = f"those after {known[0]} to {known[-1]} steps are" if known else "none is yet"
            raise ValueError(f"step is {step}: its state is not remembered; {words}")
        return self._ends[known.index(step)]

    def _next(self) -> Delivery | None:
        begin = time.perf_counter()
        if not self._subscribed:
            self._source.subscribe(self._position)
            self._subscribed = True
        delivery = self._source.next()
        self.wait_seconds += time.perf_counter() - begin
        if delivery is None:
            return None
        if self._position.wave > 0 and delivery.batch.plan != self._plan:
            raise LoaderError(
                f"rank {self.rank}: the state was taken inside step {delivery.batch.step} under plan {self._plan}, "
                f"this mesh plans {delivery.batch.plan}: use the same ranks, capacity and cost, or a state from a "
                "step's end"
            )
        self._plan = delivery.batch.plan
        self._position = delivery.next_position
        if self._position.wave == 0:
            self._ends.append(self._position.state)
        return delivery

    def _open_inline(self, settings: LoaderSettings | None, options: ServeOptions) -> None:
        if settings is None:
            raise ValueError("settings is None: mode 'inline' needs them")
        feed = Feed(settings, cache=Cache.default(options.cache, options.cache_bytes))
        self.settings, self._start, self._data = feed.settings, feed.start, feed.data_fingerprint
        self.vocab_size = feed.shards.vocab_size
        self._source = Inline(feed, self.rank, options.ledger)

    def _open_client(self, settings: LoaderSettings | None, connect: Callable[..., Client]) -> None:
        try:
            client = connect(alive=self._process.check if self._process else lambda: None)
        except BaseException:
            if self._process:
                self._process.stop()
            raise
        self._source = client
        try:
            welcome = client.welcome()
            served = LoaderSettings.from_json(welcome.settings)
            if settings is not None and settings.seed is None:
                settings = replace(settings, seed=served.seed)  # any will do
            if settings is not None and settings.resolved() != served:
                raise ValueError(f"the loader at {client.endpoint} serves other settings: {served}, not {settings}")
        except BaseException:
            self.close()
            raise
        self.settings, self._start, self._data = served, StreamState.from_dict(welcome.state), welcome.data
        self.vocab_size = welcome.vocab_size

    def _with_seed(self, settings: LoaderSettings) -> LoaderSettings:
        """Without a seed, the one that the first rank draws, on all ranks: each machine has a loader of its own."""
        if settings.seed is not None:
            return settings
        if not _is_distributed():
            return settings.resolved()
        drawn = str(settings.resolved().seed) if torch.distributed.get_rank() == 0 else ""
        return replace(settings, seed=int(exchange_texts(drawn, self._make.device)[0]))

    def _own_endpoint(self, settings: LoaderSettings | None, start: Callable[[LoaderSettings], LoaderProcess]) -> str:
        """Start this machine's loader process, or learn where the machine's first rank started it."""
        if settings is None:
            raise ValueError("settings is None: give them, or the endpoint of a loader that runs")
        if not _is_distributed():
            self._process = start(settings)
            return self._process.endpoint
        process, first = torch.distributed.get_rank(), _first_of_machine()
        report = ""
        if process == first:
            try:
                self._process = start(settings)
                report = f"endpoint {self._process.endpoint}"
            except (LoaderError, OSError) as error:  # the others wait for a word: give it to them, too
                report = f"error {error}"
        kind, _, text = exchange_texts(report, self._make.device)[first].partition(" ")
        if kind == "error":
            raise LoaderError(f"process {first} could not start the loader process: {text}")
        return text


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _own_rank() -> int:
    return torch.distributed.get_rank() if _is_distributed() else 0


def _first_of_machine() -> int:
    """The process of this job that starts this machine's loader."""
    rank = torch.distributed.get_rank()
    return rank - rank % int(os.environ.get("LOCAL_WORLD_SIZE", torch.distributed.get_world_size()))
