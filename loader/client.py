"""The rank's side of the wire: says hello, takes batches, gives credit back. Numpy only; `embedded` makes tensors."""

from __future__ import annotations

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
    Hello,
    Message,
    Welcome,
    decode,
    decode_batch,
    encode,
    payload_bytes,
)

POLL_SECONDS = 0.2  # how often a waiting rank looks whether the loader process lives


class Client:
    """One rank's connection to a loader process.

    timeout: seconds to wait for any answer. credit: bytes of batches that may be under way. alive: called while
    waiting; raises if the loader process is known to be dead.
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
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # credits limit what is queued, in bytes
        self._socket.connect(endpoint)
        self._session = 0
        self._sequence = 0
        self._used: Ack | None = None

    def welcome(self) -> Welcome:
        """Say hello without credit: learn what the loader serves. Raises LoaderError where it refuses this rank."""
        return self._hello(None, wave=0, credit=0)

    def subscribe(self, position: Position) -> None:
        """Ask for the batches from a position on; what an earlier subscription left under way is dropped."""
        self._hello(position.state.to_dict(), wave=position.wave, credit=self._credit)

    def next(self) -> Delivery | None:
        """The next batch, its arrays read-only views of the received frames; None after the last.

        Gives the credit of the batch before back. Raises LoaderTimeoutError without an answer in time, LoaderError
        where the loader reports one, WireError for a batch that is not the one expected.
        """
        if self._used:
            self._socket.send_multipart(encode(self._used))
            self._used = None
        message, frames = self._receive()
        if isinstance(message, End):
            return None
        if not isinstance(message, Batch):
            raise WireError(f"rank {self.rank}: expected a batch, got {type(message).__name__.lower()}")
        if message.sequence != self._sequence:
            raise WireError(f"rank {self.rank}: expected batch {self._sequence}, got {message.sequence}")
        self._sequence += 1
        self._used = Ack(session=self._session, sequence=message.sequence, credit=payload_bytes(frames))
        before, after = StreamState.from_dict(message.before), StreamState.from_dict(message.after)
        return Delivery(decode_batch(message, frames), before, after)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.send_multipart(encode(Bye(session=self._session)), zmq.NOBLOCK)
            self._socket.close()
            self._context.term()

    def _hello(self, state: dict[str, int] | None, *, wave: int, credit: int) -> Welcome:
        self._session += 1
        self._sequence = 0
        self._used = None
        hello = Hello(rank=self.rank, session=self._session, credit=credit, state=state, wave=wave)
        self._socket.send_multipart(encode(hello))
        message, _ = self._receive()
        if not isinstance(message, Welcome):
            raise WireError(f"rank {self.rank}: expected a welcome, got {type(message).__name__.lower()}")
        return message

    def _receive(self) -> tuple[Message, list[Any]]:
        """The next message of this session and its array frames."""
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LoaderTimeoutError(
                    f"rank {self.rank}: no answer from the loader at {self.endpoint} within {self.timeout:g} s "
                    f"(waiting for batch {self._sequence} of session {self._session}): is it running?"
                )
            if not self._socket.poll(int(min(left, POLL_SECONDS) * 1000) + 1):
                self._alive()
                continue
            header, *frames = self._socket.recv_multipart(copy=False)
            message = decode(header.buffer)
            if getattr(message, "session", None) != self._session:
                continue  # left over from before a hello
            if isinstance(message, Error):
                raise LoaderError(f"rank {self.rank}: {message.message}")
            return message, [frame.buffer for frame in frames]
