"""Connecting a command to a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from seqmesh.loader.fleet.cluster import import_ray

ANSWER_SECONDS = 5.0


@contextmanager
def connected(address: str, *, what: str, logs: bool = True) -> Iterator[Any]:
    """The module `ray`, connected until the block ends. A connection that is there already is used, and stays.

    address: as for `ray.init`. what: needs it, in a message. logs: whether what processes on the cluster print comes
    here. Raises ModuleNotFoundError without Ray, ConnectionError where no cluster is at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_ray(what)
    if ray.is_initialized():
        yield ray
        return
    _check_answers(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
    ray.init(address=address, logging_level=logging.WARNING, log_to_driver=logs)
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself tries for minutes, and then ends the process."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"no Ray cluster answers at {address}: {error}; see `ray status`") from error
