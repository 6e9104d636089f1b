"""The dedicated loader process: one per machine, serves every rank of the machine over ZeroMQ. Never imports torch.

`python -m seqmesh.loader.server` reads one JSON line from its input (see `Order`), opens the data, compiles or loads
its routines, binds the endpoint, prints `ready` and serves until a second line or the end of its input comes, or the
process that ordered it is gone. `seqmesh serve` runs the same in the foreground. Exit codes:

    0    stopped by its owner, or its owner is gone
    2    refused at start: unfit settings or data, or a busy endpoint; the reason is the last line of its error output
    3    failed while serving, for a reason nobody foresaw; the traceback is in its error output
    130  ended by SIGINT
    143  ended by SIGTERM

On the way out it logs how many batches each rank had under way. A rank is served as long as the credit it gave, in
bytes, lasts, so the memory held for a slow or dead rank is bounded and nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, cast

import zmq

from seqmesh.loader.endpoint import check_endpoint, listening
from seqmesh.loader.errors import LoaderError, ServingError, WireError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.order import FAILED, REFUSED, STOP, STOP_AND_CLEAR_UP, STOPPED, Order
from seqmesh.loader.reader import Reader
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import StreamState
from seqmesh.loader.wire import (
    Ack,
    Bye,
    End,
    Error,
    Hello,
    Message,
    Unknown,
    Welcome,
    decode,
    encode,
    encode_batch,
    payload_bytes,
)

MAX_HEARD = 1000  # messages between two rounds of serving: a flood must not keep ranks waiting
MAX_REFUSALS_LOGGED = 100  # in full; the count goes on
GOING_SECONDS = 0.5  # how much later than its loader an owner may end that got the same signal

log = logging.getLogger("seqmesh.loader")


class LoaderServer:
    """Serves the ranks of one job over a bound ROUTER socket; `run` is its loop.

    refused: messages that were not of this protocol, or not a rank's to send.
    """

    def __init__(self, feed: Feed, socket: zmq.Socket[bytes]) -> None:
        self.feed = feed
        self.socket = socket
        self.job = secrets.token_hex(8)
        self.refused = 0
        self._readers: dict[bytes, Reader] = {}

    def run(self, *, ready: Callable[[], None], until: Sequence[int]) -> int:
        """Say `ready`, serve until one of the descriptors `until` becomes readable, return which."""
        try:
            ready()
            return self._run(until)
        finally:
            self._log_end()

    def _run(self, until: Sequence[int]) -> int:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        for descriptor in until:
            poller.register(descriptor, zmq.POLLIN)
        busy = False
        while True:
            # Between any two rounds every rank is heard: one that takes much must not keep another waiting.
            ready = dict(poller.poll(0 if busy else self._idle_milliseconds()))
            for descriptor in until:
                if descriptor in ready:
                    return descriptor
            self._hear()
            busy = self._serve()
            self._beat()

    def _log_end(self) -> None:
        """What the ranks that are still connected will not get."""
        for reader in self._readers.values():
            log.info("rank %d: %d batches sent, %d not acknowledged", reader.rank, reader.sent, reader.under_way)
        log.info("ended with %d ranks, %d messages refused", len(self._readers), self.refused)

    def _idle_milliseconds(self) -> int | None:
        """How long nothing has to be done by itself: until the next heartbeat is due; None: for ever."""
        due = min((reader.next_heartbeat() for reader in self._readers.values()), default=float("inf"))
        return None if due == float("inf") else max(0, int((due - time.monotonic()) * 1000) + 1)

    def _hear(self) -> None:
        for _ in range(MAX_HEARD):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames: a rank sends one")
                self._handle(identity, decode(frames[0]))
            except WireError as error:
                self._refuse(identity, error)

    def _handle(self, identity: bytes, message: Message) -> None:
        match message:
            case Hello():
                self._welcome(identity, message)
            case Ack() if identity in self._readers:
                self._readers[identity].acknowledge(message)
            case Ack():
                self._send(identity, Unknown(session=message.session))
            case Bye():
                self._readers.pop(identity, None)
            case _:
                raise WireError(f"a {type(message).__name__.lower()} from a rank")

    def _refuse(self, identity: bytes, error: WireError) -> None:
        """Count a message that is not ours. A rank that sends one is served no longer: what else is wrong with it?"""
        self.refused += 1
        if self.refused <= MAX_REFUSALS_LOGGED:
            log.warning("refused a message: %s", error)
        if identity in self._readers:
            self._drop(identity, f"sent a message that was refused: {error}")

    def _drop(self, identity: bytes, reason: str) -> None:
        """Serve a reader no longer, and tell it why."""
        reader = self._readers.pop(identity)
        log.error("rank %d: %s", reader.rank, reason)
        self._send(identity, Error(session=reader.session, message=reason))

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        try:
            state = StreamState.from_dict(hello.state) if hello.state is not None else self.feed.start
            if hello.rank >= self.feed.settings.ranks:
                raise ValueError(f"rank is {hello.rank}: this loader serves ranks 0 to {self.feed.settings.ranks - 1}")
        except ValueError as error:
            self._send(identity, Error(session=hello.session, message=str(error)))
            return
        # A rank that comes back under another connection replaces the one that was, which hardly lives to hear it.
        for other in [i for i, reader in self._readers.items() if reader.rank == hello.rank and i != identity]:
            self._drop(other, "another process reads as this rank now")
        self._readers[identity] = Reader(
            rank=hello.rank,
            session=hello.session,
            position=Position(state, hello.wave),
            limit=hello.credit,
        )
        welcome = Welcome(
            session=hello.session,
            job=self.job,
            settings=self.feed.settings.to_json().decode(),
            state=self.feed.start.to_dict(),
            data=self.feed.data_fingerprint,
            vocab_size=self.feed.shards.manifest.vocab_size,
        )
        self._send(identity, welcome)

    def _serve(self) -> bool:
        """One round: a batch for each rank whose credit allows it; whether anything was sent."""
        sent = [self._serve_one(identity, reader) for identity, reader in list(self._readers.items())]
        return any(sent)

    def _serve_one(self, identity: bytes, reader: Reader) -> bool:
        """Send one batch to one rank; whether there was one to send."""
        if reader.ended or reader.limit == 0:
            return False
        try:
            if reader.waiting is None:
                self._prepare(reader)
        except (LoaderError, ValueError) as error:
            self._drop(identity, str(error))
            return False
        if reader.waiting is None:
            reader.ended = True
            self._send(identity, End(session=reader.session, sequence=reader.sent))
            return False
        size = payload_bytes(reader.waiting[1:])
        return reader.may_send(size) and self._send_frames(identity, reader.take_waiting(size))

    def _prepare(self, reader: Reader) -> None:
        """Assemble the reader's next batch; leaves nothing waiting at the end of the last epoch."""
        delivery = self.feed.deliver(reader.rank, reader.position)
        if delivery is None:
            return
        reader.waiting = encode_batch(
            delivery.batch,
            session=reader.session,
            sequence=reader.sent,
            before=delivery.before.to_dict(),
            after=delivery.after.to_dict(),
        )
        reader.position = delivery.next_position

    def _beat(self) -> None:
        """A heartbeat for each rank that got nothing for a while; finds connections that are gone."""
        now = time.monotonic()
        for identity, reader in list(self._readers.items()):
            if reader.next_heartbeat() <= now:
                self._send(identity, reader.heartbeat(self.refused))

    def _send(self, identity: bytes, message: Message) -> bool:
        return self._send_frames(identity, encode(message))

    def _send_frames(self, identity: bytes, frames: list[Any]) -> bool:
        """Queue frames for one connection; forget its reader if it is gone."""
        reader = self._readers.get(identity)
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if reader:
                log.warning("rank %d is gone, %d batches under way", reader.rank, reader.under_way)
                del self._readers[identity]
            return False
        if reader:
            reader.spoken = time.monotonic()
        return True


def serve(settings: LoaderSettings, endpoint: str, *, ready: Callable[[], None], until: Sequence[int] = ()) -> int:
    """Open the data, bind `endpoint`, call `ready`, and serve until one of the descriptors `until` becomes readable,
    which is returned, or a signal's handler raises. To be called in the main thread.

    Raises what `Feed` raises for unfit data, OSError for an endpoint that can not be bound, ValueError for one that
    other machines could reach. Once it serves, only ServingError.
    """
    check_endpoint(endpoint)
    feed = Feed(settings)
    feed.deliver(0, Position(feed.start))  # compiles what is not in the cache before a rank waits for it
    with listening(endpoint) as socket, _signals() as signals:
        try:
            return LoaderServer(feed, socket).run(ready=ready, until=[signals, *until])
        except Exception as error:
            log.exception("failed while serving")
            raise ServingError(f"the loader failed while serving: {error!r}") from error


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


def raise_exit(number: int, _frame: Any) -> None:
    """A signal handler: end by an exception, so that sockets and folders are cleaned up on the way."""
    raise SystemExit(128 + number)


def _say_ready() -> None:
    os.write(sys.stdout.fileno(), b"ready\n")


def _carry_out(order: Order, orders: BinaryIO) -> None:
    """Serve until another line comes, or the owner is gone. Raises what `serve` raises."""
    try:
        owner = os.pidfd_open(order.owner)
    except ProcessLookupError:
        shutil.rmtree(order.folder, ignore_errors=True)
        return
    try:
        ended = serve(order.settings, order.endpoint, ready=_say_ready, until=[owner, orders.fileno()])
    except SystemExit:  # by a signal, which the owner may have got as well
        _clear_up_after(owner, order.folder)
        raise
    word = b"" if ended == owner else orders.readline()
    if word == STOP_AND_CLEAR_UP:
        shutil.rmtree(order.folder, ignore_errors=True)
    elif word != STOP:  # the owner is gone, or just going: a dying process closes its files first
        _clear_up_after(owner, order.folder)


def _clear_up_after(owner: int, folder: str) -> None:
    """Remove the folder if its owner is gone, or is just going: nobody else will."""
    gone, _, _ = select.select([owner], [], [], GOING_SECONDS)
    if gone:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Carry out one order from standard input; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, raise_exit)
    try:
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as orders:  # a buffer would hide the next line
            _carry_out(Order.from_json(orders.readline()), cast(BinaryIO, orders))
    except ServingError:
        return FAILED
    except (LoaderError, ValueError, OSError) as error:
        log.error("%s", error)
        return REFUSED
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
