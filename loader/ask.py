"""Questions to a loader on a connection of their own: they need no hello, and disturb no batches that are under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from seqmesh.loader.endpoint import keep_alive
from seqmesh.loader.errors import LoaderTimeoutError, WireError
from seqmesh.loader.keys import prove_rank
from seqmesh.loader.stream import StreamState
from seqmesh.loader.wire import Counted, CountSteps, decode, encode

ANSWER_SECONDS = 1.0  # after which a question is asked again: the loader may have been started again
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.2  # seconds, between questions to a loader that is still counting


def ask_steps(
    endpoint: str,
    state: StreamState,
    *,
    timeout: float,
    alive: Callable[[], None] = lambda: None,
    keys: Path | None = None,
) -> int:
    """Global batches of the whole job that stands at `state`, as the loader counts them. Raises ValueError where it can
    not, the job having no end, say; LoaderTimeoutError where it has not within `timeout` seconds; what `alive` raises.
    """
    deadline, pause, counting = time.monotonic() + timeout, FIRST_PAUSE, False
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        keep_alive(socket, endpoint)
        if keys is not None:
            prove_rank(socket, keys)
        socket.connect(endpoint)
        while (left := deadline - time.monotonic()) > 0:
            answer = _ask(socket, CountSteps(state=state.to_dict()), min(left, ANSWER_SECONDS))
            if answer and answer.error:
                raise ValueError(answer.error)
            if answer and answer.steps is not None:
                return answer.steps
            alive()
            counting |= answer is not None
            if answer:
                time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
                pause = min(2 * pause, LONGEST_PAUSE)
    still = ": it is still counting; ask again, or wait longer" if counting else ": is it running?"
    raise LoaderTimeoutError(f"no number of steps from the loader at {endpoint} within {timeout:g} s{still}")


def _ask(socket: zmq.Socket[bytes], question: CountSteps, seconds: float) -> Counted | None:
    """The answer to a question, if one comes in time. It may be that to an earlier one, which was the same."""
    with contextlib.suppress(zmq.Again):
        socket.send_multipart(encode(question), zmq.NOBLOCK)
    if not socket.poll(int(seconds * 1000) + 1):
        return None
    with contextlib.suppress(WireError):
        answer = decode(socket.recv_multipart()[0])
        return answer if isinstance(answer, Counted) else None
    return None
