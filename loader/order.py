"""`Order`: what an embedding process asks of the loader process it starts, and the exit codes it may get back."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.explain import explain
from seqmesh.loader.settings import LoaderSettings

# What the owner writes to end the process. It may be killed before it can clear up itself: hence the second word.
STOP = b"stop\n"
STOP_AND_CLEAR_UP = b"stop and clear up\n"

# What the process says of itself: it waits for the one that serves to end; it serves.
STANDBY = b"standby\n"
READY = b"ready\n"

STOPPED = 0  # by its owner, or because its owner is gone
REFUSED = 2  # the settings, the data or the endpoint
FAILED = 3  # for a reason nobody foresaw
# After these the same would happen again, or somebody wanted the end: no reason to start another process.
FINAL = {STOPPED, REFUSED} | {code for n in (signal.SIGINT, signal.SIGTERM) for code in (128 + n, -n)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to serve, whatever is served. standby: wait where another loader has the endpoint, and take over when it is
    gone. keys: folder of `keys.create_keys`, needed at an address that other machines reach. also: a tcp address to
    listen at beside the endpoint, where that is for the ranks of this machine, and others come from elsewhere. metrics:
    address for Prometheus, HOST:PORT. ledger: folder to record in what every step trained on, see `ledger`. poison:
    overwrite recycled slots, to find out who still reads one. cache, cache_bytes: folder for copies of data that can
    not be read in its place, and the most bytes in it, see `cache.Cache`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    standby: bool = False
    keys: str | None = None
    also: str | None = None
    metrics: str | None = None
    ledger: str | None = None
    poison: bool = False
    cache: str | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """settings: the job's. endpoint: where to listen. owner: process id whose end is the loader's end too. folder: to
    be removed when the owner is gone, since nobody else will; empty: none."""

    settings: LoaderSettings
    endpoint: str
    owner: int
    folder: str = ""
    options: ServeOptions = field(default_factory=ServeOptions)

    def to_json(self) -> str:
        """One line."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: bytes | str) -> Order:
        """Raises ValueError for anything else than what `to_json` gives."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not an order for a loader process: {explain(error)}") from error


_ADAPTER = TypeAdapter(Order)
