"""Where the loaders of a fleet are, which of them a rank reads from, and a file that tells those who are not on Ray.

{"version": 1, "loaders": [{"node": "0dee...", "on": "0dee...", "host": "10.0.0.1", "local": "ipc:///...", ...}]}

All loaders of a fleet plan the same job alike, so each can serve every rank. Nothing here is secret.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from seqmesh.loader.explain import explain
from seqmesh.loader.files import atomic_write
from seqmesh.loader.machine import machine

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One loader of a fleet. node: for which it was started. on: where it is; both are Ray's ids. host: address of the
    machine that it is on; machine: which start of which machine that is. local: endpoint for the ranks of the machine;
    remote: for all others, empty where there is none. pid: of the loader process. restarts: how often that was started
    again since Ray started its actor. alive: it serves, or is just started again; trouble: why not."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    node: str
    on: str
    host: str
    machine: str
    local: str
    remote: str
    pid: int
    restarts: int
    alive: bool
    trouble: str = ""

    def endpoint(self) -> str:
        """From this machine; empty: it can not be reached."""
        return self.local if is_here(self) else self.remote


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFile:
    """Says where a rank's loader is, from a file that `write_places` wrote; for `Loader(endpoint=...)`."""

    path: Path
    node: str = ""

    def __call__(self) -> str:
        return endpoint_of(read_places(self.path), node=self.node)


def from_file(path: str | Path, node: str = "") -> FromFile:
    """What says where the loader of a node (its id or address; by default: of this machine) is, or where another is
    that lives. Its calls raise OSError without the file, ValueError for another file, LookupError where none lives."""
    return FromFile(path=Path(path), node=node)


def is_here(place: Place) -> bool:
    """Whether a loader is on this machine, and its folder in sight: a container may have another /tmp."""
    folder = Path(place.local.removeprefix("ipc://")).parent
    return place.alive and place.machine == machine() and folder.is_dir()


def endpoint_of(places: Sequence[Place], *, node: str = "") -> str:
    """Where a rank on this machine reads: from a loader on the machine, else from the one of its node (id or address;
    of several on the machine that one, too), else from the next that lives. Raises LookupError where none does."""
    own = next((n for n, place in enumerate(places) if node in (place.node, place.host)), 0)
    in_turn = [*places[own:], *places[:own]]  # ranks of different nodes fall back on different loaders
    for place in sorted(in_turn, key=is_here, reverse=True):
        if place.alive and (endpoint := place.endpoint()):
            return endpoint
    raise LookupError(f"no loader can be reached: {'; '.join(map(_why_not, places)) or 'the fleet has none'}")


def write_places(path: Path, places: Sequence[Place]) -> None:
    """Write the file, whole or not at all. Raises OSError where it can not be written."""
    text = json.dumps({"version": VERSION, "loaders": [asdict(place) for place in places]}, indent=1)
    atomic_write(path, f"{text}\n".encode())


def read_places(path: Path) -> list[Place]:
    """Raises OSError where it can not be read, ValueError for anything else than what `write_places` wrote."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"needs version {VERSION}")
        return _ADAPTER.validate_python(found["loaders"])
    except ValidationError as error:
        raise ValueError(f"{path} is not a file of a fleet's endpoints: {explain(error)}") from error
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a file of a fleet's endpoints: {error}") from error


def _why_not(place: Place) -> str:
    return f"node {place.node[:8]} at {place.host}: {place.trouble or 'is on another machine, and listens on no other'}"


_ADAPTER = TypeAdapter(list[Place])
