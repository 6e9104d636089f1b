"""The rank's side of the wire: says hello, takes batches, gives credit back. Numpy only; `embedded` makes tensors.

The client knows the position of the batch it waits for, and says hello again from there whenever something may be
lost: after a silence, when the loader does not know it, when batches are missing. What an earlier session left in the
pipe is dropped. So every batch is delivered once, whatever happens to the messages or to the loader in between.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import zmq

from seqmesh.loader.errors import LoaderError, LoaderTimeoutError, WireError
from seqmesh.loader.feed import Delivery, Position
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
    Unknown,
    Welcome,
    decode,
    decode_batch,
    encode,
    payload_bytes,
)

POLL_SECONDS = 0.2  # how often a waiting rank looks whether the loader process lives
SILENCE_SECONDS = 5.0  # several heartbeats: then hello is said again, and again after twice as long
LINGER_MILLISECONDS = 500  # how long closing may wait for a loader to take the last messages


class Client:
    """One rank's connection to a loader process.

    timeout: seconds to wait for any answer. credit: bytes of batches that may be under way. alive: called while
    waiting; raises if the loader process is known to be dead for good.
    """

    def __init__(
        self, endpoint: str, *, rank: int, credit: int, timeout: float, alive: Callable[[], None] = lambda: None
    ) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.timeout = timeout
        self._credit = credit
        self._alive = alive
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # credits limit what is queued, in bytes
        self._socket.connect(endpoint)
        self._position: Position | None = None  # of the batch to come next; None before `subscribe`
        self._session = 0
        self._sequence = 0  # of the batch to come next, in this session
        self._served: Welcome | None = None  # what the loader serves: it may not change under way
        self._welcomed = False  # in this session
        self._ended = False
        self._used: Ack | None = None  # of this session
        self._heard = 0.0  # when the loader was last heard, or hello said, in seconds of the monotonic clock
        self._patience = 0.0  # seconds of silence until hello is said again

    def welcome(self) -> Welcome:
        """Say hello without credit: learn what the loader serves. Raises LoaderError where it refuses this rank."""
        return self._open(None)

    def subscribe(self, position: Position) -> None:
        """Ask for the batches from a position on; what an earlier subscription left under way is dropped."""
        self._open(position)

    def next(self) -> Delivery | None:
        """The next batch, its arrays read-only views of the received frames; None after the last.

        Gives the credit of the batch before back. Raises LoaderTimeoutError without a batch in time, LoaderError
        where the loader reports one, WireError for a batch that is not the one expected.
        """
        if self._ended:
            return None
        if self._used:
            self._send(self._used)
        message, frames = self._receive(Batch, End)
        if isinstance(message, End):
            self._ended = True
            return None
        assert isinstance(message, Batch)
        before, after = StreamState.from_dict(message.before), StreamState.from_dict(message.after)
        delivery = Delivery(decode_batch(message, frames), before, after)
        if self._position != Position(before, delivery.batch.wave):
            raise WireError(f"rank {self.rank}: asked for {self._position}, got wave {delivery.batch.wave} of {before}")
        self._sequence += 1
        self._position = delivery.next_position
        used_bytes = payload_bytes(frames) + (self._used.credit if self._used else 0)
        self._used = Ack(session=self._session, sequence=message.sequence, credit=used_bytes)
        return delivery

    def close(self) -> None:
        """Leave. Takes half a second at most, also when the loader is gone; does nothing the second time."""
        if not self._socket.closed:
            self._send(Bye(session=self._session))
            self._socket.close()
            self._context.term()

    def _open(self, position: Position | None) -> Welcome:
        self._position = position
        self._ended = False
        self._patience = min(SILENCE_SECONDS, self.timeout / 2)
        self._hello()
        message, _ = self._receive(Welcome)
        assert isinstance(message, Welcome)
        return message

    def _hello(self) -> None:
        """Begin a session at the position of the next batch. Without one, ask for no batches."""
        self._session += 1
        self._sequence = 0
        self._welcomed = False
        self._used = None
        self._heard = time.monotonic()
        state = self._position.state.to_dict() if self._position else None
        wave = self._position.wave if self._position else 0
        credit = self._credit if self._position else 0
        self._send(Hello(rank=self.rank, session=self._session, credit=credit, state=state, wave=wave))

    def _send(self, message: Message) -> None:
        """Never waits: a message that a full queue does not take is lost, as it would be with a dead loader."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)

    def _receive(self, *wanted: type[Message]) -> tuple[Message, list[Any]]:
        """The next message of a wanted type, and its array frames."""
        deadline = time.monotonic() + self.timeout
        while (left := deadline - time.monotonic()) > 0:
            # First what came while the rank was computing, however long ago.
            if not self._socket.poll(0) and not self._socket.poll(int(min(left, POLL_SECONDS) * 1000) + 1):
                self._alive()
                self._break_silence()
                continue
            header, *frames = self._socket.recv_multipart(copy=False)
            message = decode(header.buffer)
            if self._accept(message) and isinstance(message, wanted):
                return message, [frame.buffer for frame in frames]
        raise LoaderTimeoutError(
            f"rank {self.rank}: no answer from the loader at {self.endpoint} within {self.timeout:g} s "
            f"(waiting for batch {self._sequence} of session {self._session}): is it running?"
        )

    def _break_silence(self) -> None:
        if time.monotonic() - self._heard >= self._patience:
            self._patience *= 2  # a loader that plans a huge step must come to the end of it
            self._hello()

    def _accept(self, message: Message) -> bool:
        """Whether a message is of this session, with none missing before it; says hello again where one is."""
        if getattr(message, "session", None) != self._session:
            return False  # left over from before a hello
        if isinstance(message, Error):
            raise LoaderError(f"rank {self.rank}: {message.message}")
        self._heard = time.monotonic()
        self._patience = min(SILENCE_SECONDS, self.timeout / 2)
        if isinstance(message, Welcome):
            self._check_served(message)
            self._welcomed = True
        elif isinstance(message, Unknown) or not self._welcomed or self._is_missing_before(message):
            self._hello()
            return False
        elif isinstance(message, Heartbeat) and self._used:
            self._send(self._used)  # the loader may wait for this very ack
        return not (isinstance(message, Batch) and message.sequence < self._sequence)  # a duplicate

    def _is_missing_before(self, message: Message) -> bool:
        """Whether batches were sent before this message that did not come."""
        return isinstance(message, Batch | Heartbeat | End) and message.sequence > self._sequence

    def _check_served(self, welcome: Welcome) -> None:
        """Raises LoaderError where a loader at the same endpoint serves something else than the one before it."""
        if self._served and (self._served.settings, self._served.data) != (welcome.settings, welcome.data):
            raise LoaderError(
                f"rank {self.rank}: the loader at {self.endpoint} was started again with other settings or data: "
                f"{welcome.settings}, data {welcome.data}; were {self._served.settings}, data {self._served.data}"
            )
        self._served = welcome
