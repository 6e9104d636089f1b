"""The rank's side of the wire: says hello, takes batches, gives credit back. Numpy only; `embedded` makes tensors.

The client knows the position of the batch it waits for, and says hello again from there whenever something may be
lost: on a new connection, after a silence, when the loader does not know it, when batches are missing or damaged. What
an earlier session left in the pipe is dropped. So every batch is delivered once, whatever happens to the messages or to
the loader in between, also where another one goes on at another address. A batch's block, in the rank's ring or in a
frame, is let go of when no array or tensor over it is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from seqmesh.loader.address import Address
from seqmesh.loader.arena import Mapping, watched
from seqmesh.loader.ask import ask_steps
from seqmesh.loader.batch import NumpyBatch
from seqmesh.loader.endpoint import keep_alive
from seqmesh.loader.errors import CreditError, LoaderError, LoaderTimeoutError, WireError
from seqmesh.loader.feed import Delivery, Position
from seqmesh.loader.handover import fetch, handover_path
from seqmesh.loader.keys import check_keys, prove_rank
from seqmesh.loader.reader import HEARTBEAT_SECONDS, MAX_UNDER_WAY, reader_name
from seqmesh.loader.stream import StreamState
from seqmesh.loader.wire import (
    Ack,
    Batch,
    Bye,
    End,
    Error,
    Heartbeat,
    Hello,
    Message,
    Transport,
    Unknown,
    Welcome,
    check_frame,
    decode,
    decode_batch,
    encode,
    layout_of,
)

ACK_MILLISECONDS = 2  # of waiting after which an ack is sent that was not due yet
POLL_SECONDS = 0.2  # how often a waiting rank looks whether the loader process lives
ANSWER_SECONDS = 0.01  # how often a rank looks for the first answer to where the loader is
SILENCE_SECONDS = 5.0  # several heartbeats: then hello is said again, and again after twice as long
LINGER_MILLISECONDS = 500  # how long closing may wait for a loader to take the last messages
# The end of a connection, and what ends the handshake of one. The last handshake of all says why nobody answers.
EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# Handshakes that say what is wrong: one of a later try that ends without a word does not change that.
TELLING = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


class Client:
    """One process's connection to a loader: `peer` of the `peers` processes that hold the replica of `rank` together.

    endpoint: where the loader is, or a callable that says so. It is asked in a thread, at start, about every second
    while there is no connection, and whenever the rank has heard nothing for its patience. Where it says something else
    than before, the rank goes on there, at its exact next batch; an exception, or no answer yet, means to stay.

    timeout: seconds to wait for any answer. credit: bytes of batches that may be under way. alive: called while
    waiting; raises if the loader process is known to be dead for good. transport: `shm` for batches in shared memory,
    `zmq` for frames, `auto` for the first where the endpoint is on this machine for certain. keys: folder of keys, for
    a loader that asks for them.
    """

    def __init__(
        self,
        endpoint: str | Callable[[], str],
        *,
        rank: int,
        peer: int = 0,
        peers: int = 1,
        credit: int,
        timeout: float,
        alive: Callable[[], None] = lambda: None,
        transport: Literal["auto", "shm", "zmq"] = "auto",
        keys: Path | None = None,
    ) -> None:
        """Raises ValueError for settings that do not fit together or keys that can not be used."""
        if rank < 0 or not 0 <= peer < peers:
            raise ValueError(f"rank is {rank}, peer is {peer} of {peers}: must be at least 0, and peer below peers")
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout:g}: must be over 0 seconds")
        if keys is not None:
            check_keys(keys)
        self.endpoint = ""  # none yet
        self.rank, self.peer, self.peers = rank, peer, peers
        self.timeout = timeout
        self.transport: Transport = transport_of(endpoint if isinstance(endpoint, str) else "ipc://", transport)
        self._wanted_transport = transport
        self._process = os.getpid()
        self._name = secrets.token_hex(8)
        self._credit = credit
        self._alive = alive
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # credits limit what is queued, in bytes
        self._socket.setsockopt(zmq.RCVTIMEO, ACK_MILLISECONDS)
        self._socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            prove_rank(self._socket, keys)
        self._keys = keys
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._connections = 0  # made so far to this endpoint
        self._handshake = 0  # how the last one went; 0: none yet
        self._lost = True  # no connection yet, or none any more
        self._address = Address(endpoint)
        self._address.ask()
        if isinstance(endpoint, str):
            self._connect(endpoint)
        self._position: Position | None = None  # of the batch to come next; None before `subscribe`
        self._session = 0
        self._sequence = 0  # of the batch to come next
        self._held: dict[int, int] = {}  # batches whose blocks are still in use, and their bytes
        self._released: deque[int] = deque()  # those that are not any more; from whatever thread
        self._owed = 0  # bytes let go of since the last ack
        self._acked = 0  # batches that the last ack told of
        self._rings: dict[str, Mapping] = {}  # by name: the newest alone, views keep older ones
        self._served: Welcome | None = None  # what the loader serves: it may not change under way
        self._welcomed = False  # in this session
        self._ended = False
        self._heard = 0.0  # when the loader was last heard, or hello said, in seconds of the monotonic clock
        self._lively = 0.0  # when the loader was last heard
        self._patience = 0.0  # seconds of silence until hello is said again
        self._trouble = ""  # what was wrong with what was heard last, if anything

    def welcome(self) -> Welcome:
        """Say hello without credit: learn what the loader serves. Raises LoaderError where it refuses this rank."""
        return self._open(None)

    def subscribe(self, position: Position) -> None:
        """Ask for the batches from a position on; what an earlier subscription left under way is dropped. Raises
        LoaderError in a process that was forked from the one that opened this client."""
        self._check_process()
        self._open(position)

    def next(self) -> Delivery | None:
        """The next batch, its arrays read-only views of its block; None after the last.

        Gives back the credit of batches that are not in use any more, at the latest when it has to wait. Raises
        LoaderTimeoutError without a batch in time, CreditError where batches in use hold all the credit, LoaderError
        where the loader reports one, WireError for a batch that is not the one expected.
        """
        self._check_process()
        if self._ended:
            return None
        self._settle()
        if self._owed > self._credit // 2 or self._sequence - self._acked > MAX_UNDER_WAY // 2:
            self.give_back()  # before the loader waits for it; for less, a message is too dear
        message, batch = self._receive(Batch, End)
        if isinstance(message, End):
            self._ended = True
            return None
        assert isinstance(message, Batch) and self._position is not None and batch is not None
        here = self._position
        if (batch.step, batch.wave) != (here.state.step, here.wave):
            raise WireError(
                f"{self._who}: asked for wave {here.wave} of step {here.state.step}, got {batch.wave} of {batch.step}"
            )
        self._position = here.following(None if message.after is None else StreamState.from_dict(message.after))
        return Delivery(batch, self._position)

    def give_back(self) -> None:
        """Tell the loader what is not in use any more."""
        self._settle()
        self._owed = 0
        self._acked = self._sequence
        self._send(Ack(session=self._session, sequence=self._sequence, held=sorted(self._held)))

    def count_steps(self, state: StreamState) -> int:
        """Global batches of the job that stands at a state, see `ask.ask_steps`. Batches under way stay as they are."""
        return ask_steps(self.endpoint, state, timeout=self.timeout, alive=self._alive, keys=self._keys)

    def close(self) -> None:
        """Leave. Takes half a second at most, also when the loader is gone; does nothing the second time, nor in a
        forked process. Views stay what they are until this process ends."""
        if self._socket.closed or self._process != os.getpid():
            return
        self._settle()
        self._send(Bye(session=self._session, sequence=self._sequence, held=sorted(self._held)))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _connect(self, endpoint: str) -> None:
        """Leave the endpoint that there is, if any, for this one. Raises ValueError or ZMQError for an unfit one."""
        transport = transport_of(endpoint, self._wanted_transport)
        keep_alive(self._socket, endpoint)
        self._socket.connect(endpoint)
        if self.endpoint:
            self._socket.disconnect(self.endpoint)
        self.endpoint, self.transport = endpoint, transport
        self._connections, self._handshake, self._lost = 0, 0, True

    def _check_process(self) -> None:
        """A forked process shares the socket, but has none of the threads that serve it: it would wait for ever."""
        if self._process != os.getpid():
            raise LoaderError(
                f"{self._who}: opened in process {self._process}, used in process {os.getpid()}, which was forked from "
                "it: open a loader where it is used"
            )

    @property
    def _who(self) -> str:
        return reader_name(self.rank, self.peer, self.peers)

    def _open(self, position: Position | None) -> Welcome:
        self._position = position
        self._ended = False
        self._patience = self._first_patience()
        self._hello()
        message, _ = self._receive(Welcome)
        assert isinstance(message, Welcome)
        return message

    def _first_patience(self) -> float:
        return min(SILENCE_SECONDS, self.timeout / 2)

    def _hello(self) -> None:
        """Begin a session at the position of the next batch. Without one, ask for no batches."""
        self._session += 1
        self._welcomed = False
        self._heard = time.monotonic()
        self._settle()
        self._owed, self._acked = 0, self._sequence
        hello = Hello(
            client=self._name,
            rank=self.rank,
            peer=self.peer,
            peers=self.peers,
            session=self._session,
            sequence=self._sequence,
            held=sorted(self._held),
            credit=self._credit if self._position else 0,
            state=self._position.state.to_dict() if self._position else None,
            wave=self._position.wave if self._position else 0,
            transport=self.transport,
        )
        self._send(hello)

    def _settle(self) -> None:
        """Take note of what was let go of since the last time."""
        while self._released:
            self._owed += self._held.pop(self._released.popleft(), 0)

    def _send(self, message: Message) -> None:
        """Never waits: a message that a full queue does not take is lost, as it would be with a dead loader."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)

    def _receive(self, *wanted: type[Message]) -> tuple[Message, NumpyBatch | None]:
        """The next message of a wanted type, and the batch that it announces."""
        deadline = time.monotonic() + self.timeout
        while (left := deadline - time.monotonic()) > 0:
            # First what came while the rank was computing, however long ago.
            if (received := self._get()) is None:
                if not self._wait(left):
                    self._alive()
                    self._follow()
                    self._break_silence()
                continue
            header, *frames = received
            try:
                message = decode(header.buffer)
                if self._accept(message) and isinstance(message, wanted):
                    return message, self._take(message, frames) if isinstance(message, Batch) else None
            except WireError as error:  # what came damaged is as good as lost
                self._trouble = str(error)
                self._hello()
        raise self._too_late()

    def _get(self) -> list[zmq.Frame] | None:
        """The next message if there is one, or comes at once."""
        try:
            return self._socket.recv_multipart(copy=False)
        except zmq.Again:
            return None

    def _wait(self, left: float) -> bool:
        """Wait a little for a message; whether there is one. If none comes at once, the loader may wait for an ack."""
        if self._owed or self._acked < self._sequence:
            self.give_back()
        seconds = POLL_SECONDS if self.endpoint else ANSWER_SECONDS
        ready = dict(self._poller.poll(int(min(left, seconds) * 1000) + 1))
        if self._monitor in ready:
            self._note_event()
        return self._socket in ready

    def _note_event(self) -> None:
        """Say hello on a new connection: the loader behind it may be new, too."""
        event = recv_monitor_message(self._monitor)["event"]
        self._lost = event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        is_less = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._handshake in TELLING
        if event != zmq.EVENT_DISCONNECTED and not is_less:
            self._handshake = event
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connections += 1
            if self._connections > 1:  # the first hello waited for the first
                self._hello()

    def _follow(self) -> None:
        """Go where the loader is now, if that is elsewhere."""
        if self._lost:
            self._address.ask()
        endpoint = self._address.answer
        if endpoint in (None, self.endpoint):
            return
        try:
            self._connect(endpoint)
        except (ValueError, zmq.ZMQError) as error:
            self._address.refuse(f"{endpoint!r}: {error}")
        else:
            self._patience = self._first_patience()
            self._hello()

    def _too_late(self) -> LoaderError:
        at = self.endpoint or "an address that is not known"
        where = f"{self._who}: no answer from the loader at {at} within {self.timeout:g} s"
        self._settle()
        if self._held and time.monotonic() - self._lively < 3 * HEARTBEAT_SECONDS:
            return CreditError(
                f"{self._who}: no batch within {self.timeout:g} s, {len(self._held)} are still in use and may hold all "
                f"of {self._credit} bytes of credit: let go of them, copy what you keep, or give more credit_bytes"
            )
        if reason := why_refused(self._handshake, self._keys):
            return LoaderTimeoutError(f"{where}: {reason}")
        trouble = f"; the last message was refused: {self._trouble}" if self._trouble else ""
        waiting = f"waiting for batch {self._sequence} of session {self._session}"
        trouble += self._address.words_of_trouble()
        return LoaderTimeoutError(f"{where} ({waiting}{trouble}): is it running?")

    def _take(self, message: Batch, frames: list[Any]) -> NumpyBatch:
        """A batch, whose block is in use from now on. Raises WireError where it is not there as announced."""
        number = self._sequence
        starts, size = layout_of(message)
        released = partial(self._released.append, number)
        if message.arena:
            try:
                block = self._ring(message.arena).block(message.offset, size, released)
            except ValueError as error:
                raise WireError(str(error)) from error
        else:
            block = watched(check_frame(message, [frame.buffer for frame in frames], size), 0, size, released)
        self._held[number] = size
        self._sequence += 1
        self._trouble = ""
        return decode_batch(message, block, starts)

    def _ring(self, name: str) -> Mapping:
        """The memory of this name, mapped when it is met for the first time."""
        if name not in self._rings:
            assert self._served is not None
            found = fetch(self._served.rings, f"{name} {self._name}", self.timeout)
            if found is None:
                raise WireError(f"the loader at {self.endpoint} has no ring {name!r} any more")
            try:
                self._rings = {name: Mapping(*found)}
            except OSError as error:
                raise LoaderError(f"{self._who}: a ring of {found[1]} bytes can not be mapped: {error}") from error
        return self._rings[name]

    def _break_silence(self) -> None:
        if time.monotonic() - self._heard >= self._patience:
            self._patience *= 2  # a loader that plans a huge step must come to the end of it
            self._address.ask()
            self._hello()

    def _accept(self, message: Message) -> bool:
        """Whether a message is of this session, with none missing before it; says hello again where one is."""
        if isinstance(message, Error | Unknown):
            self._rings = {}  # to be fetched anew: so the loader, which has forgotten this process, knows it again
        if getattr(message, "session", None) != self._session:
            return False  # left over from before a hello
        if isinstance(message, Error):
            raise LoaderError(f"{self._who}: {message.message}")
        now = time.monotonic()
        if isinstance(message, Batch):  # a large one on a slow link: nothing else can come meanwhile
            self._patience = min(max(SILENCE_SECONDS, 2 * (now - self._heard)), self.timeout / 2)
        self._heard = self._lively = now
        if isinstance(message, Welcome):
            self._check_served(message)
            self._welcomed = True
        elif isinstance(message, Unknown) or not self._welcomed or self._is_missing_before(message):
            self._hello()
            return False
        elif isinstance(message, Heartbeat):
            self.give_back()  # the loader may wait for an ack that was lost
        return not (isinstance(message, Batch) and message.sequence < self._sequence)  # a duplicate

    def _is_missing_before(self, message: Message) -> bool:
        """Whether batches were sent before this message that did not come."""
        return isinstance(message, Batch | Heartbeat | End) and message.sequence > self._sequence

    def _check_served(self, welcome: Welcome) -> None:
        """Raises LoaderError where a loader serves something else than the one before it, here or elsewhere."""
        if self._served and (self._served.settings, self._served.data) != (welcome.settings, welcome.data):
            raise LoaderError(
                f"{self._who}: the loader at {self.endpoint} has other settings or data than the one before it: "
                f"{welcome.settings}, data {welcome.data}; were {self._served.settings}, data {self._served.data}"
            )
        self._served = welcome


def why_refused(handshake: int, keys: Path | None) -> str:
    """What the way that a handshake ended says about keys; empty: nothing."""
    if handshake == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"it refused the key of this rank, {keys}/rank.key_secret: its own folder of keys is another"
    if handshake == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "it asks for keys, and this rank has none" if keys is None else f"it has no keys, this rank has {keys}"
    if handshake == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and keys is not None:
        return f"it has no keys or not the one in {keys}/loader.key: it ended the connection without a word"
    return ""


def transport_of(endpoint: str, wanted: Literal["auto", "shm", "zmq"]) -> Transport:
    """Raises ValueError for shared memory at an address that may be on another machine."""
    local = bool(handover_path(endpoint))
    if wanted not in ("auto", "shm", "zmq"):
        raise ValueError(f"transport is {wanted!r}: must be auto, shm or zmq")
    if wanted == "shm" and not local:
        raise ValueError(f"transport is 'shm': {endpoint} is not on this machine for certain; needs ipc://PATH")
    return "shm" if local and wanted != "zmq" else "zmq"
