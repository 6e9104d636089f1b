"""`Service`: the loop of the loader process. Hears ranks, sends each what `supply` has for it, and knows who is there.

A rank is served as long as the credit it gave, in bytes, lasts, so the memory held for a slow or dead rank is bounded
and nobody waits for anybody. Where the loader listens, and how its process begins and ends, is `server`'s.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from seqmesh.loader.errors import LoaderError, WireError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.handover import Handover
from seqmesh.loader.ledger.recorder import Recorder
from seqmesh.loader.reader import Reader
from seqmesh.loader.steps import StepCounter
from seqmesh.loader.stream import StreamState
from seqmesh.loader.supply import Supply
from seqmesh.loader.wire import (
    Ack,
    Bye,
    Counted,
    CountSteps,
    End,
    Error,
    Hello,
    Message,
    Unknown,
    Welcome,
    decode,
    encode,
)

MAX_HEARD = 1000  # messages between two rounds of serving: a flood must not keep ranks waiting
MAX_REFUSALS_LOGGED = 100  # in full; the count goes on
MAX_PEERS = 1 << 12

log = logging.getLogger("seqmesh.loader")


class Service:
    """Serves the ranks of one job over a bound ROUTER socket; `run` is its loop.

    handover: where ranks get the memory of their rings; None: all blocks travel as frames. poison: overwrite recycled
    slots, so that whoever still reads one finds out. recorder: of the ledger.
    """

    def __init__(
        self,
        feed: Feed,
        socket: zmq.Socket[bytes],
        handover: Handover | None = None,
        *,
        poison: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.feed = feed
        self.socket = socket
        self.handover = handover
        self.job = secrets.token_hex(8)
        self.counters = feed.counters
        self._recorder = recorder
        self._supply = Supply(feed, poison=poison, recorder=recorder)
        self._steps = StepCounter(feed)
        arrivals = feed.shards.arrivals
        self._store = arrivals.store if arrivals else None  # tells of parts that arrive, for which ranks wait
        self._readers: dict[bytes, Reader] = {}
        self._left: list[Reader] = []  # served no longer, but their processes may still look at slots
        self._poller = zmq.Poller()

    def run(self, *, ready: Callable[[], None], until: Sequence[int]) -> int:
        """Say `ready`, serve until one of the descriptors `until` becomes readable, return which."""
        try:
            ready()
            return self._run(until)
        finally:
            self._end()

    def _run(self, until: Sequence[int]) -> int:
        self._poller.register(self.socket, zmq.POLLIN)
        arrivals = () if self._store is None else (self._store.descriptor,)
        for descriptor in (*until, *arrivals, *(self.handover.descriptors if self.handover else ())):
            self._poller.register(descriptor, zmq.POLLIN)
        busy = False
        while True:
            # Between any two rounds every rank is heard: one that takes much must not keep another waiting.
            ready = {source for source, _ in self._poller.poll(0 if busy else self._idle_milliseconds())}
            if ended := ready.intersection(until):
                return next(descriptor for descriptor in until if descriptor in ended)
            self._hear()
            self._notice(each for each in ready if each is not self.socket)
            busy = self._serve()
            self._beat()
            if self._recorder and self._recorder.due <= time.monotonic():
                self._recorder.flush()

    def _end(self) -> None:
        """What the ranks that are still connected will not get."""
        self._steps.close()
        for reader in self._readers.values():
            log.info(
                "%s: %d batches sent, %d not acknowledged", reader.name, reader.sequence, reader.sequence - reader.got
            )
        log.info("ended with %d ranks, %d messages refused", len(self._readers), self.counters.refused)
        for reader in (*self._readers.values(), *self._left):
            if reader.pidfd >= 0:
                os.close(reader.pidfd)
        self._supply.close()

    def _idle_milliseconds(self) -> int | None:
        """How long nothing has to be done by itself: until a heartbeat or the ledger is due; None: for ever."""
        due = min((reader.next_heartbeat() for reader in self._readers.values()), default=float("inf"))
        due = min(due, self._recorder.due) if self._recorder else due
        return None if due == float("inf") else max(0, int((due - time.monotonic()) * 1000) + 1)

    # What is heard.

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
        reader = self._readers.get(identity)
        match message:
            case Hello():
                self._welcome(identity, message)
            case Ack() if reader:
                reader.unanswered = 0
                if message.session == reader.session:  # one of an earlier session says nothing about this one
                    self._supply.note_delivered(reader, message.sequence)
                    self._supply.take_back(reader, reader.let_go(message.sequence, message.held))
            case Ack():
                self._send(identity, Unknown(session=message.session))
            case CountSteps():
                self._send(identity, self._count(message))
            case Bye():  # also of one whose connection was found gone before this was heard
                reader = reader or next((left for left in self._left if left.identity == identity), None)
                if reader:
                    self._supply.note_delivered(reader, message.sequence)
                    self._leave(reader, held=message.held)
            case _:
                raise WireError(f"a {type(message).__name__.lower()} from a rank")

    def _count(self, question: CountSteps) -> Counted:
        try:
            return Counted(steps=self._steps.count(StreamState.from_dict(question.state)), error="")
        except ValueError as error:
            return Counted(steps=None, error=str(error))

    def _refuse(self, identity: bytes, error: WireError) -> None:
        """Count a message that is not ours. A rank that sends one is served no longer: what else is wrong with it?"""
        self.counters.refused += 1
        if self.counters.refused <= MAX_REFUSALS_LOGGED:
            log.warning("refused a message: %s", error)
        if reader := self._readers.get(identity):
            self._drop(reader, f"sent a message that was refused: {error}")

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        try:
            position = self._check(hello)
            if hello.transport == "shm" and hello.credit:
                self._supply.ring(hello.rank).reserve(hello.credit)
        except (ValueError, LoaderError) as error:
            self._send(identity, Error(session=hello.session, message=str(error)))
            return
        reader = self._reader(identity, hello, position)
        self._supply.note_delivered(reader, hello.sequence)
        self._supply.note_lost(reader)
        self._supply.take_back(reader, reader.let_go(1 << 63, hello.held))
        reader.begin(hello, position)
        self.counters.ranks[hello.rank].hellos += 1
        welcome = Welcome(
            session=hello.session,
            job=self.job,
            settings=self.feed.settings.to_json().decode(),
            state=self.feed.start.to_dict(),
            data=self.feed.data_fingerprint,
            vocab_size=self.feed.shards.vocab_size,
            rings=self.handover.path if self.handover else "",
        )
        self._send(identity, welcome)

    def _check(self, hello: Hello) -> Position:
        """Where to begin. Raises ValueError for what this loader does not serve."""
        state = StreamState.from_dict(hello.state) if hello.state is not None else self.feed.start
        if hello.rank >= self.feed.settings.ranks:
            raise ValueError(f"rank is {hello.rank}: this loader serves ranks 0 to {self.feed.settings.ranks - 1}")
        if not hello.peer < hello.peers <= MAX_PEERS:
            raise ValueError(f"peer is {hello.peer} of {hello.peers}: must be below, and those at most {MAX_PEERS}")
        if hello.transport == "shm" and self.handover is None:
            raise ValueError("transport is 'shm': this loader listens at an address without shared memory; use 'zmq'")
        return Position(state, hello.wave)

    def _reader(self, identity: bytes, hello: Hello, position: Position) -> Reader:
        """The reader of this client. Another client that reads as the same rank is replaced: it hardly lives to hear
        it. One that comes back, under another connection or after it was sent away, goes on: its process is known."""
        place = hello.rank, hello.peer
        known = (each for each in (*self._readers.values(), *self._left) if each.client == hello.client)
        reader = next((each for each in known if (each.rank, each.peer) == place), None)
        for other in list(self._readers.values()):
            if other is reader:
                del self._readers[other.identity]
            elif (other.rank, other.peer) == place:
                self._drop(other, "another process reads as this rank now")
            elif other.identity == identity:
                self._leave(other)
        if reader in self._left:
            self._left.remove(reader)
        reader = reader or Reader(
            identity=identity,
            client=hello.client,
            rank=hello.rank,
            peer=hello.peer,
            peers=hello.peers,
            position=position,
            continued=hello.session > 1,
        )
        reader.identity = identity
        self._supply.ring(hello.rank).expect(hello.peer)
        self._readers[identity] = reader
        return reader

    # Who is gone.

    def _notice(self, descriptors: Iterable[Any]) -> None:
        """Parts that have arrived, ranks that want memory, and processes that have ended; but nothing of those that
        have left just now."""
        for descriptor in descriptors:
            if descriptor not in self._poller:
                continue
            if self._store and descriptor == self._store.descriptor:
                self._store.drain()
            elif self.handover and descriptor in self.handover.descriptors:
                self._hand_over(descriptor)
            else:
                self._bury(descriptor)

    def _hand_over(self, descriptor: int) -> None:
        assert self.handover is not None
        if descriptor != self.handover.listener.fileno():
            self._poller.unregister(descriptor)
        before = set(self.handover.descriptors)
        served = self.handover.serve(descriptor, self._supply.find_memory)
        after = set(self.handover.descriptors)
        for gone in before - after - {descriptor}:
            self._poller.unregister(gone)
        for new in after - before:
            self._poller.register(new, zmq.POLLIN)
        if served is not None:
            self._watch(*served)

    def _watch(self, ticket: str, pidfd: int) -> None:
        """The reader that got memory is this process: its end will be seen."""
        client = ticket.partition(" ")[2]
        reader = next((reader for reader in self._readers.values() if reader.client == client), None)
        if reader is None or reader.pidfd >= 0 or pidfd < 0:
            if pidfd >= 0:
                os.close(pidfd)
            return
        reader.pidfd = pidfd
        self._poller.register(pidfd, zmq.POLLIN)

    def _bury(self, pidfd: int) -> None:
        """A process has ended: nobody looks at its slots any more."""
        self._poller.unregister(pidfd)
        os.close(pidfd)
        for reader in [*self._readers.values(), *self._left]:
            if reader.pidfd == pidfd:
                reader.pidfd = -1
                if reader.identity in self._readers:
                    log.warning("%s is gone, %d batches under way", reader.name, len(reader.under_way))
                self._leave(reader)

    def _drop(self, reader: Reader, reason: str) -> None:
        """Serve a reader no longer, and tell it why."""
        log.error("%s: %s", reader.name, reason)
        self._send(reader.identity, Error(session=reader.session, message=reason))
        self._leave(reader, held=reader.under_way)

    def _leave(self, reader: Reader, *, held: Iterable[int] = ()) -> None:
        """Forget a reader. What it holds is kept as long as its process lives, where that is known."""
        if served := self._readers.get(reader.identity) is reader:
            del self._readers[reader.identity]
        if reader in self._left:
            self._left.remove(reader)
        self._supply.take_back(reader, reader.let_go(1 << 63, held if reader.pidfd >= 0 else ()))
        if served:  # or another may be in its place by now
            self._supply.ring(reader.rank).forget(reader.peer)
        if reader.under_way:
            self._left.append(reader)
        elif reader.pidfd >= 0:
            self._poller.unregister(reader.pidfd)
            os.close(reader.pidfd)
            reader.pidfd = -1

    # What is sent.

    def _serve(self) -> bool:
        """One round: a batch for each rank whose credit allows it; whether anything was sent."""
        sent = [self._serve_one(reader) for reader in list(self._readers.values())]
        return any(sent)

    def _serve_one(self, reader: Reader) -> bool:
        """Send one batch to one rank; whether there was one to send."""
        if reader.ended or reader.limit == 0:
            return False
        try:
            frames = self._supply.next_batch(reader, self._behind(reader))
        except (LoaderError, ValueError) as error:
            self._drop(reader, str(error))
            return False
        if reader.ended:
            self._send(reader.identity, End(session=reader.session, sequence=reader.sequence))
        return frames is not None and self._send_frames(reader.identity, frames)

    def _behind(self, reader: Reader) -> list[int]:
        """Peers of this reader that will want the batch it gets now: those that have yet to come there."""
        if reader.peers == 1:
            return []
        others = {other.peer: other for other in self._readers.values() if other.rank == reader.rank}
        return [
            peer
            for peer in range(reader.peers)
            if peer != reader.peer and (peer not in others or _place(others[peer]) <= _place(reader))
        ]

    def _beat(self) -> None:
        """A heartbeat for each rank that got nothing for a while; finds connections that are gone."""
        now = time.monotonic()
        for reader in list(self._readers.values()):
            if reader.next_heartbeat() <= now:
                self._send(reader.identity, reader.heartbeat(self.counters.refused))

    def _send(self, identity: bytes, message: Message) -> bool:
        return self._send_frames(identity, encode(message))

    def _send_frames(self, identity: bytes, frames: list[Any]) -> bool:
        """Queue frames for one connection; forget its reader if it is gone."""
        reader = self._readers.get(identity)
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=len(frames) == 1)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if reader:
                log.warning("%s is gone, %d batches under way", reader.name, len(reader.under_way))
                self._leave(reader, held=reader.under_way)
            return False
        if reader:
            reader.spoken = time.monotonic()
        return True


def _place(reader: Reader) -> tuple[int, int]:
    return reader.position.state.step, reader.position.wave
