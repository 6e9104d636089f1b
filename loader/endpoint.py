"""Where a loader listens: which addresses are allowed, whose turn it is, and a bound socket."""

from __future__ import annotations

import contextlib
import socket as unix
from collections.abc import Iterator
from pathlib import Path

import filelock
import zmq

from seqmesh.loader.handover import check_length
from seqmesh.loader.keys import proving_loader
from seqmesh.loader.wire import MAX_HEADER_BYTES

ALLOWED = ("ipc://", "tcp://127.0.0.1:", "tcp://[::1]:")
LOCK_SUFFIX = ".lock"  # of an ipc endpoint's path
IDLE_SECONDS = 2  # between machines: the kernel asks the other one after so long
DEAD_SECONDS = 6  # and a connection is cut where no answer came for so long


def check_endpoint(endpoint: str, *, keys: str | None = None) -> None:
    """Raises ValueError for an address that other machines could reach without keys, since nothing would encrypt or
    authenticate the link; and for a path that is too long."""
    check_length(endpoint)
    if endpoint.startswith("tcp://") and keys is not None:
        return
    if not endpoint.startswith(ALLOWED):
        raise ValueError(
            f"endpoint is {endpoint!r}: must be ipc://PATH or a loopback address, tcp://127.0.0.1:PORT; "
            "any other tcp address needs keys"
        )


def claim_of(endpoint: str) -> filelock.BaseFileLock | None:
    """Whoever holds it may listen at an ipc endpoint; the kernel gives it back when the holder dies. None for other
    endpoints, which the kernel itself gives to one process only."""
    path = endpoint.removeprefix("ipc://") + LOCK_SUFFIX
    return filelock.FileLock(path) if endpoint.startswith("ipc://") else None


def keep_alive(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Find out about connections between machines that are cut without a word. Left to the kernel: ZeroMQ's heartbeats
    wait behind a large message, and so give up a connection that is only slow."""
    if endpoint.startswith("tcp://"):
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE_SECONDS)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, DEAD_SECONDS - IDLE_SECONDS)
        socket.setsockopt(zmq.TCP_MAXRT, DEAD_SECONDS * 1000)  # where something is under way, no question is asked
        socket.setsockopt(zmq.CONNECT_TIMEOUT, DEAD_SECONDS * 1000)  # or the kernel tries ever more rarely


@contextlib.contextmanager
def listening(endpoint: str, *, keys: str | None = None, also: str | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A ROUTER socket that is bound to the endpoint, and to `also`. Raises OSError where that can not be."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, contextlib.ExitStack() as stack:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a connection is gone
        socket.setsockopt(zmq.SNDHWM, 0)  # credits limit what is queued, in bytes
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        keep_alive(socket, also or endpoint)
        if keys is not None:
            stack.enter_context(proving_loader(context, socket, Path(keys)))
        for address in filter(None, (endpoint, also)):
            _bind(socket, address)
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
