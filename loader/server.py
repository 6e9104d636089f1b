"""The dedicated loader process: one per machine, serves every rank of the machine over ZeroMQ. Never imports torch.

`python -m seqmesh.loader.server` reads one JSON line from its input (see `Order`), opens the data, compiles or loads
its routines, binds the endpoint, prints `ready` and serves until it is told to stop or the process that ordered it is
gone. `seqmesh serve` runs the same in the foreground. Exit codes: 0 stopped or abandoned, 2 refused at start (the
reason is the last line of its error output), 130 and 143 by SIGINT and SIGTERM.

A rank is served as long as the credit it gave, in bytes, lasts, so the memory held for a slow or dead rank is bounded
and nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket as unix
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from seqmesh.loader.errors import LoaderError, WireError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import StreamState
from seqmesh.loader.wire import (
    MAX_HEADER_BYTES,
    Ack,
    Bye,
    End,
    Error,
    Hello,
    Message,
    Welcome,
    decode,
    encode,
    encode_batch,
    payload_bytes,
)

MAX_UNDER_WAY = 256  # batches; bounds the read-ahead of very small ones, of which the credit would allow thousands

log = logging.getLogger("seqmesh.loader")


@dataclass(slots=True, kw_only=True)
class Reader:
    """A rank that is being served: where it is, how many bytes it will still take, what waits for more credit."""

    rank: int
    session: int
    position: Position
    limit: int
    credit: int
    sequence: int = 0
    under_way: int = 0
    waiting: list[Any] | None = None
    ended: bool = False

    def may_send(self, size: int) -> bool:
        """Within the credit, or, if nothing is under way, any size: one batch may be larger than all the credit."""
        return self.under_way == 0 or (size <= self.credit and self.under_way < MAX_UNDER_WAY)


class LoaderServer:
    """Serves the ranks of one job over a bound ROUTER socket; `run` is its loop."""

    def __init__(self, feed: Feed, socket: zmq.Socket[bytes]) -> None:
        self.feed = feed
        self.socket = socket
        self.job = secrets.token_hex(8)
        self.refused_messages = 0
        self._readers: dict[bytes, Reader] = {}

    def run(self, *, until: Sequence[int]) -> None:
        """Serve until one of the descriptors `until` becomes readable."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        for descriptor in until:
            poller.register(descriptor, zmq.POLLIN)
        busy = False
        while True:
            # Between any two rounds every rank is heard: one that takes much must not keep another waiting.
            ready = dict(poller.poll(0 if busy else None))
            if not ready.keys().isdisjoint(until):
                return
            while self._receive():
                pass
            busy = self._serve()

    def _receive(self) -> bool:
        """Handle one message; whether there was one."""
        try:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            if len(frames) != 1:
                raise WireError(f"{len(frames)} frames: a rank sends one")
            self._handle(identity, decode(frames[0]))
        except WireError as error:
            self.refused_messages += 1
            log.warning("refused a message: %s", error)
        return True

    def _handle(self, identity: bytes, message: Message) -> None:
        match message:
            case Hello():
                self._welcome(identity, message)
            case Ack():
                reader = self._readers.get(identity)
                if reader and reader.session == message.session:
                    reader.credit = min(reader.credit + message.credit, reader.limit)
                    reader.under_way = max(reader.under_way - 1, 0)
            case Bye():
                self._readers.pop(identity, None)
            case _:
                raise WireError(f"a {type(message).__name__.lower()} from a rank")

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        try:
            state = StreamState.from_dict(hello.state) if hello.state is not None else self.feed.start
            if hello.rank >= self.feed.settings.ranks:
                raise ValueError(f"rank is {hello.rank}: this loader serves ranks 0 to {self.feed.settings.ranks - 1}")
        except ValueError as error:
            self._send(identity, encode(Error(session=hello.session, message=str(error))))
            return
        # A rank that comes back under another connection replaces the one that was.
        for other in [i for i, reader in self._readers.items() if reader.rank == hello.rank]:
            del self._readers[other]
        self._readers[identity] = Reader(
            rank=hello.rank,
            session=hello.session,
            position=Position(state, hello.wave),
            limit=hello.credit,
            credit=hello.credit,
        )
        welcome = Welcome(
            session=hello.session,
            job=self.job,
            settings=self.feed.settings.to_json().decode(),
            state=self.feed.start.to_dict(),
            data=self.feed.data_fingerprint,
            vocab_size=self.feed.shards.manifest.vocab_size,
        )
        self._send(identity, encode(welcome))

    def _serve(self) -> bool:
        """One round: a batch for each rank whose credit allows it; whether anything was sent."""
        sent = [self._serve_one(identity) for identity in list(self._readers)]
        return any(sent)

    def _serve_one(self, identity: bytes) -> bool:
        """Send one batch to one rank; whether there was one to send."""
        reader = self._readers.get(identity)
        if reader is None or reader.ended or reader.limit == 0:
            return False
        try:
            if reader.waiting is None:
                self._prepare(reader)
        except (LoaderError, ValueError) as error:
            log.error("rank %d: %s", reader.rank, error)
            del self._readers[identity]
            self._send(identity, encode(Error(session=reader.session, message=str(error))))
            return False
        if reader.waiting is None:
            reader.ended = True
            self._send(identity, encode(End(session=reader.session, sequence=reader.sequence)))
            return False
        size = payload_bytes(reader.waiting[1:])
        if not reader.may_send(size):
            return False
        reader.credit -= size
        reader.under_way += 1
        frames, reader.waiting = reader.waiting, None
        return self._send(identity, frames)

    def _prepare(self, reader: Reader) -> None:
        """Assemble the reader's next batch; leaves nothing waiting at the end of the last epoch."""
        delivery = self.feed.deliver(reader.rank, reader.position)
        if delivery is None:
            return
        reader.waiting = encode_batch(
            delivery.batch,
            session=reader.session,
            sequence=reader.sequence,
            before=delivery.before.to_dict(),
            after=delivery.after.to_dict(),
        )
        reader.position = delivery.next_position
        reader.sequence += 1

    def _send(self, identity: bytes, frames: list[Any]) -> bool:
        """Queue frames for one rank; forget the rank if its connection is gone."""
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.warning("a rank is gone: %s", error)
            self._readers.pop(identity, None)
            return False
        return True


def serve(settings: LoaderSettings, endpoint: str, *, ready: Callable[[], None], until: int | None = None) -> None:
    """Open the data, bind `endpoint`, call `ready`, and serve until `until` becomes readable or a signal's handler
    raises. To be called in the main thread.

    Raises what `Feed` raises for unfit data, OSError for an endpoint that can not be bound, ValueError for one that
    other machines could reach: nothing encrypts or authenticates this link.
    """
    if not endpoint.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://[::1]:")):
        raise ValueError(f"endpoint is {endpoint!r}: must be ipc://PATH or a loopback address, tcp://127.0.0.1:PORT")
    feed = Feed(settings)
    feed.deliver(0, Position(feed.start))  # compiles what is not in the cache before a rank waits for it
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, _signals() as signals:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, 0)  # credits limit what is queued, in bytes
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        _bind(socket, endpoint)
        ready()
        LoaderServer(feed, socket).run(until=[signals] if until is None else [signals, until])


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that becomes readable when a signal comes.

    ZeroMQ has threads of its own: one of them may take the signal, and the main thread, where Python runs handlers,
    would sleep on in its poll.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writing)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an embedding process asks for: the settings, where to listen, and whose end is the loader's end too."""

    settings: LoaderSettings
    endpoint: str
    owner: int

    def to_json(self) -> str:
        fields = {"settings": self.settings.to_json().decode(), "endpoint": self.endpoint, "owner": self.owner}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Order:
        fields = json.loads(text)
        return cls(
            settings=LoaderSettings.from_json(fields["settings"]), endpoint=fields["endpoint"], owner=fields["owner"]
        )


def _say_ready() -> None:
    os.write(sys.stdout.fileno(), b"ready\n")


def raise_exit(number: int, _frame: Any) -> None:
    """A signal handler: end by an exception, so that sockets and folders are cleaned up on the way."""
    raise SystemExit(128 + number)


def main() -> int:
    """Carry out one order from standard input; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, raise_exit)
    order = Order.from_json(sys.stdin.readline())
    owner = os.pidfd_open(order.owner)
    try:
        serve(order.settings, order.endpoint, ready=_say_ready, until=owner)
    except (LoaderError, ValueError, OSError) as error:
        log.error("%s", error)
        return 2
    shutil.rmtree(Path(order.endpoint.removeprefix("ipc://")).parent)  # its owner is gone: nobody else will
    return 0


if __name__ == "__main__":
    sys.exit(main())
