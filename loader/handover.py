"""How a rank gets a ring's memory: the descriptor passes over a Unix socket beside the loader's endpoint.

The rank connects, sends the arena's name, and gets its size with the descriptor attached; the loader learns from the
kernel which process that was, and can see it end. Processes of other users get nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from seqmesh.loader.errors import LoaderError, LoaderTimeoutError

SUFFIX = ".rings"  # of the endpoint's path
MAX_SOCKET_PATH = 107  # sun_path of a Unix socket, without its final zero
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
DESCRIPTOR = struct.Struct("i")
MAX_NAME = 64
RETRY_SECONDS = 0.01
MAX_PENDING = 64  # connections that have not said what they want

Find = Callable[[str], tuple[int, int] | None]  # descriptor and size of the arena of a name


def handover_path(endpoint: str) -> str:
    """Where the loader at an endpoint hands over memory; empty where ranks are not on its machine for certain."""
    return endpoint.removeprefix("ipc://") + SUFFIX if endpoint.startswith("ipc://") else ""


def check_length(endpoint: str) -> None:
    """Raises ValueError for an ipc endpoint whose path is too long for the sockets there."""
    if len(os.fsencode(path := handover_path(endpoint))) > MAX_SOCKET_PATH:
        raise ValueError(f"{path}: over {MAX_SOCKET_PATH} bytes, too long for a socket; choose a shorter folder")


@dataclass(slots=True)
class Handover:
    """The loader's side, which listens at `path`. Never waits: `descriptors` are to be polled, and `serve` called with
    those that are ready."""

    path: str
    listener: socket.socket
    _pending: dict[int, socket.socket] = field(default_factory=dict)

    @property
    def descriptors(self) -> list[int]:
        return [self.listener.fileno(), *self._pending]

    def serve(self, descriptor: int, find: Find) -> tuple[str, int] | None:
        """Take a connection, or answer one: then the name that it got, and a pidfd of its process (−1: unknown)."""
        if descriptor == self.listener.fileno():
            self._accept()
            return None
        process = -1
        with self._pending.pop(descriptor) as connection:
            try:
                name = connection.recv(MAX_NAME).decode(errors="replace")
                found = find(name)
                if found is None:
                    connection.send(b"unknown")
                    return None
                process = _process_of(connection)
                socket.send_fds(connection, [str(found[1]).encode()], [found[0]])
                return name, process
            except OSError:  # it is gone
                if process >= 0:
                    os.close(process)
                return None

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        if _credentials(connection)[1] != os.geteuid():
            connection.close()
            return
        self._pending[connection.fileno()] = connection
        if len(self._pending) > MAX_PENDING:  # whoever has been silent for longest keeps nobody out
            self._pending.pop(next(iter(self._pending))).close()

    def close(self) -> None:
        for connection in self._pending.values():
            connection.close()


@contextlib.contextmanager
def handing_over(endpoint: str) -> Iterator[Handover | None]:
    """A `Handover` beside the endpoint, None where there is none to be. Raises OSError where it can not listen."""
    path = handover_path(endpoint)
    if not path:
        yield None
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a loader that was killed: whoever has bound the endpoint owns this one, too
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.setblocking(False)
        listener.listen(MAX_PENDING)
        handover = Handover(os.path.abspath(path), listener)
        try:
            yield handover
        finally:
            handover.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def fetch(path: str, name: str, timeout: float) -> tuple[int, int] | None:
    """Descriptor and size of an arena of the loader that hands over at `path`; None where that has no such arena, or
    is gone. Raises LoaderTimeoutError without an answer in time, LoaderError for a process of another user."""
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout)
        try:
            _connect(connection, path, deadline)
            if _credentials(connection)[1] != os.geteuid():
                raise LoaderError(f"{path} belongs to a process of another user")
            connection.send(name.encode())
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            # Not `socket.recv_fds`, which drops the flag: programs that are started would get the memory, too.
            answer, sent, _, _ = connection.recvmsg(MAX_NAME, socket.CMSG_LEN(DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            raise LoaderTimeoutError(f"{path}: no answer from the loader within {timeout:g} s") from error
        except OSError:
            return None
    return (DESCRIPTOR.unpack(sent[0][2])[0], int(answer)) if sent else None


def _connect(connection: socket.socket, path: str, deadline: float) -> None:
    """Raises TimeoutError after the deadline; where many connect at once the kernel does not let one wait in line."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return connection.connect(path)
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(RETRY_SECONDS)


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, gid = CREDENTIALS.unpack(raw)
    return pid, uid, gid


def _process_of(connection: socket.socket) -> int:
    """A pidfd of the other end's process; −1 where it is in a namespace that shows us no pid, or gone."""
    try:
        return os.pidfd_open(_credentials(connection)[0])
    except (OSError, ValueError, OverflowError):
        return -1
