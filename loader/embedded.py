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
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch

from seqmesh.loader.batch import PackedBatch
from seqmesh.loader.client import Client
from seqmesh.loader.errors import LoaderError
from seqmesh.loader.exchange import exchange_texts
from seqmesh.loader.feed import Delivery, Feed, Position
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import StreamState

STATE_VERSION = 1
CREDIT_BYTES = 64 << 20
RESTARTS = 3
ON_DEVICE = ("input_ids", "labels", "position_ids", "cu_seqlens")  # the rest describes segments: for the host
WIDENED = ("input_ids", "labels")  # int32 on the wire, int64 for torch's embedding and cross entropy

TorchBatch = PackedBatch[torch.Tensor]


class Source(Protocol):
    """Where a rank's batches come from."""

    def subscribe(self, position: Position) -> None: ...
    def next(self) -> Delivery | None: ...
    def close(self) -> None: ...


class Inline:
    """Batches read in this process: for tests, debugging and single-process use."""

    def __init__(self, feed: Feed, rank: int) -> None:
        self._feed = feed
        self._rank = rank
        self._position = Position(feed.start)

    def subscribe(self, position: Position) -> None:
        self._position = position

    def next(self) -> Delivery | None:
        delivery = self._feed.deliver(self._rank, self._position)
        if delivery:
            self._position = delivery.next_position
        return delivery

    def close(self) -> None:
        pass


class Loader:
    """Iterates the `PackedBatch`es of one rank. Every step gives every rank at least one batch (of no tokens where the
    rank has no documents); `batch.last_in_step` says when to reduce and update.

    settings may be None with `endpoint`: the running loader knows them. rank: by default torch.distributed's, else 0.
    timeout: seconds to wait for the loader, at start and for each batch. credit_bytes: batches read ahead, in bytes.
    restarts: how often a loader process that this Loader started, and that dies, is started again (0: never); all ranks
    of the machine go on at their exact next batch.
    wait_seconds: time spent waiting so far. vocab_size: ids that the shards' tokenizer has.
    """

    def __init__(
        self,
        settings: LoaderSettings | None = None,
        *,
        rank: int | None = None,
        mode: Literal["process", "inline"] = "process",
        endpoint: str | None = None,
        device: torch.device | str = "cpu",
        timeout: float = 120.0,
        credit_bytes: int = CREDIT_BYTES,
        restarts: int = RESTARTS,
    ) -> None:
        """Raises ValueError for settings that do not fit together, LoaderError where the loader refuses. Under
        torch.distributed every rank must make one, at the same time: they agree on the endpoint, and on a seed where
        none was set."""
        self.rank = _own_rank() if rank is None else rank
        self.wait_seconds = 0.0
        self._device = torch.device(device)
        self._process: LoaderProcess | None = None
        self._source: Source
        if settings is not None and endpoint is None:
            settings = self._with_seed(settings)
        if mode == "inline":
            self._open_inline(settings)
        else:
            if endpoint is None:
                endpoint = self._own_endpoint(settings, timeout, restarts)
            self._open_client(settings, endpoint, timeout, credit_bytes)
        self._position = Position(self._start)
        self._plan: str | None = None  # of the step that the position is inside of
        self._subscribed = False

    def __iter__(self) -> Iterator[TorchBatch]:
        while (delivery := self._next()) is not None:
            yield delivery.batch.map(self._tensor)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands: after the last batch it gave, however many were read ahead. Plain JSON.

        At a step's end it is good for any number of ranks; inside a step only for the same mesh.
        """
        return {
            "version": STATE_VERSION,
            "stream": self._position.state.to_dict(),
            "wave": self._position.wave,
            "plan": self._plan if self._position.wave > 0 else None,
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
        self._position = Position(StreamState.from_dict(state["stream"]), state["wave"])
        self._plan = state["plan"]
        self._subscribed = False

    def close(self) -> None:
        """Leave the loader, and end its process if this Loader started it."""
        self._source.close()
        if self._process:
            self._process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
                f"rank {self.rank}: the state was taken inside step {delivery.before.step} under plan {self._plan}, "
                f"this mesh plans {delivery.batch.plan}: use the same ranks, capacity and cost, or a state from a "
                "step's end"
            )
        self._plan = delivery.batch.plan
        self._position = delivery.next_position
        return delivery

    def _tensor(self, name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """A tensor of its own memory: safe to keep. Widened on the device, so that half the bytes go there."""
        widen = name in WIDENED
        on_cpu = self._device.type == "cpu"
        tensor = torch.from_numpy(array.astype(np.int64) if widen and on_cpu else array.copy())
        if name in ON_DEVICE:
            tensor = tensor.to(self._device, non_blocking=True)
        return tensor.to(torch.int64) if widen else tensor

    def _open_inline(self, settings: LoaderSettings | None) -> None:
        if settings is None:
            raise ValueError("settings is None: mode 'inline' needs them")
        feed = Feed(settings)
        self.settings, self._start, self._data = feed.settings, feed.start, feed.data_fingerprint
        self.vocab_size = feed.shards.manifest.vocab_size
        self._source = Inline(feed, self.rank)

    def _open_client(self, settings: LoaderSettings | None, endpoint: str, timeout: float, credit: int) -> None:
        alive = self._process.check if self._process else lambda: None
        client = Client(endpoint, rank=self.rank, credit=credit, timeout=timeout, alive=alive)
        self._source = client
        try:
            welcome = client.welcome()
            served = LoaderSettings.from_json(welcome.settings)
            if settings is not None and settings.seed is None:
                settings = replace(settings, seed=served.seed)  # any will do
            if settings is not None and settings.resolved() != served:
                raise ValueError(f"the loader at {endpoint} serves other settings: {served}, asked for {settings}")
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
        return replace(settings, seed=int(exchange_texts(drawn, self._device)[0]))

    def _own_endpoint(self, settings: LoaderSettings | None, timeout: float, restarts: int) -> str:
        """Start this machine's loader process, or learn where the machine's first rank started it."""
        if settings is None:
            raise ValueError("settings is None: give them, or the endpoint of a loader that runs")
        if not _is_distributed():
            self._process = LoaderProcess(settings, timeout=timeout, restarts=restarts)
            return self._process.endpoint
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", torch.distributed.get_world_size()))
        first = self.rank - self.rank % per_machine
        report = ""
        if self.rank == first:
            try:
                self._process = LoaderProcess(settings, timeout=timeout, restarts=restarts)
                report = f"endpoint {self._process.endpoint}"
            except (LoaderError, OSError) as error:  # the others wait for a word: give it to them, too
                report = f"error {error}"
        kind, _, text = exchange_texts(report, self._device)[first].partition(" ")
        if kind == "error":
            raise LoaderError(f"rank {first} could not start the loader process: {text}")
        return text


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _own_rank() -> int:
    return torch.distributed.get_rank() if _is_distributed() else 0
