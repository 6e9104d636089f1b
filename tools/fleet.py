"""`seqmesh fleet`: a loader on every node of a Ray cluster that runs, in the foreground, until SIGINT or SIGTERM."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from seqmesh.loader.fleet.cluster import Fleet, import_ray
from seqmesh.loader.fleet.places import Place, write_places
from seqmesh.loader.logs import log_plain
from seqmesh.loader.server import raise_exit
from seqmesh.tools.cluster import connected
from seqmesh.tools.serve import read_settings

LOOK_SECONDS = 1.0  # between two looks at the loaders

log = logging.getLogger("seqmesh.fleet")


def run(
    *,
    file: Path,
    address: str = "auto",
    keys: Path | None = None,
    nodes: Sequence[str] | None = None,
    num_cpus: float = 1,
    port: int = 0,
    endpoints: Path | None = None,
    console: Console | None = None,
) -> None:
    """The whole command. file: of settings. endpoints: file that says where the loaders are, for `fleet.from_file`;
    there once all serve, and removed at the end.

    Raises what `Fleet` raises, ConnectionError where no cluster is at the address; ends by SystemExit with 128 + the
    signal's number.
    """
    import_ray()
    settings = read_settings(file, {})
    log_plain()
    with (
        connected(address, what="a fleet"),
        _ended_by_signals(),
        Fleet(settings, keys=keys, nodes=nodes, num_cpus=num_cpus, port=port) as fleet,
    ):
        console, places = console or Console(), fleet.status()
        console.print(_table(places))
        with _file_of(endpoints, places) as rewrite:
            if endpoints:
                proof = f', keys="{keys}"' if keys else ""
                console.print(f'  Loader(endpoint=from_file("{endpoints}"), rank=0{proof})', soft_wrap=True)
            _watch(fleet, places, console, rewrite)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End by SystemExit, also where Ray, while it waits, makes KeyboardInterrupt of any signal."""
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)
        raise_exit(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + (came or [signal.SIGINT])[0]) from None


@contextmanager
def _file_of(path: Path | None, places: list[Place]) -> Iterator[Callable[[list[Place]], None]]:
    """What writes the file anew. Raises OSError where it can not be written now; later the loaders matter more."""

    def rewrite(places: list[Place]) -> None:
        try:
            if path:
                write_places(path, places)
        except OSError as error:
            log.error("%s can not be written, and says no more where the loaders are: %s", path, error)

    if path is None:
        yield rewrite
        return
    write_places(path, places)
    try:
        yield rewrite
    finally:
        path.unlink(missing_ok=True)


def _watch(fleet: Fleet, known: list[Place], console: Console, rewrite: Callable[[list[Place]], None]) -> None:
    """Say what changes, for ever."""
    while True:
        time.sleep(LOOK_SECONDS)
        places = fleet.status()
        for before, now in zip(known, places, strict=True):
            if before != now:
                console.print(_words(now), highlight=False, soft_wrap=True)
        if places != known:
            rewrite(places)
        known = places


def _table(places: list[Place]) -> Table:
    table = Table("node", "address", "for its own ranks", "for others", "pid")
    for place in places:
        table.add_row(place.node[:8], place.host, place.local, place.remote or "(needs --keys)", str(place.pid))
    return table


def _words(place: Place) -> str:
    if not place.alive:
        return f"node {place.node[:8]}: {place.trouble}"
    where = f"serves on node {place.on[:8]} at {place.host}, pid {place.pid}"
    return f"node {place.node[:8]}: {where}: {' '.join(filter(None, (place.local, place.remote)))}"
