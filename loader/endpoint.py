"""Where a loader listens: which addresses are allowed, and a bound socket whose queues only the credit limits."""

from __future__ import annotations

import contextlib
import socket as unix
from collections.abc import Iterator

import zmq

from seqmesh.loader.wire import MAX_HEADER_BYTES

ALLOWED = ("ipc://", "tcp://127.0.0.1:", "tcp://[::1]:")


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError for an address that other machines could reach: nothing encrypts or authenticates the link."""
    if not endpoint.startswith(ALLOWED):
        raise ValueError(f"endpoint is {endpoint!r}: must be ipc://PATH or a loopback address, tcp://127.0.0.1:PORT")


@contextlib.contextmanager
def listening(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A ROUTER socket that is bound to the endpoint. Raises OSError where that can not be."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a connection is gone
        socket.setsockopt(zmq.SNDHWM, 0)  # credits limit what is queued, in bytes
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        _bind(socket, endpoint)
        yield socket


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind, but never take a Unix socket away from a process that listens on it, as ZeroMQ would without a word."""
    if endpoint.startswith("ipc://"):
        with unix.socket(unix.AF_UNIX) as probe:
            taken = probe.connect_ex(endpoint.removeprefix("ipc://")) == 0
        if taken:
            raise OSError(f"{endpoint} can not be bound: another process listens there")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(f"{endpoint} can not be bound: {error.strerror}") from error
