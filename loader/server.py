"""The dedicated loader process: one per machine, serves every rank of the machine. Never imports torch.

`python -m seqmesh.loader.server` reads one JSON line from its input (see `Order`), opens the data, compiles or loads
its routines, binds the endpoint, prints `ready` and serves until a second line or the end of its input comes, or the
process that ordered it is gone. `seqmesh serve` runs the same in the foreground. Exit codes:

    0    stopped by its owner, or its owner is gone
    2    refused at start: unfit settings or data, or a busy endpoint; the reason is the last line of its error output
    3    failed for a reason nobody foresaw; the traceback is in its error output
    130  ended by SIGINT
    143  ended by SIGTERM

A standby prints `standby` once all but the endpoint is ready, and serves when the loader that has it is gone. Error
output is a log of one JSON object a line. On the way out it says how many batches each rank had under way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import filelock

from seqmesh.loader.counters import Counters
from seqmesh.loader.endpoint import check_endpoint, claim_of, listening
from seqmesh.loader.errors import LoaderError, ServingError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.handover import handing_over
from seqmesh.loader.ledger.recorder import recording
from seqmesh.loader.logs import log_json
from seqmesh.loader.metrics import exposing
from seqmesh.loader.order import (
    FAILED,
    READY,
    REFUSED,
    STANDBY,
    STOP,
    STOP_AND_CLEAR_UP,
    STOPPED,
    Order,
    ServeOptions,
)
from seqmesh.loader.ready import first_readable
from seqmesh.loader.registry import registered
from seqmesh.loader.service import Service
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.storage.bringer import StoreCounters
from seqmesh.loader.storage.cache import Cache

TURN_SECONDS = 0.05  # between two looks of a standby at the endpoint
GOING_SECONDS = 0.5  # how much later than its loader an owner may end that got the same signal

log = logging.getLogger("seqmesh.loader")


def serve(
    settings: LoaderSettings,
    endpoint: str,
    *,
    ready: Callable[[], None],
    standing_by: Callable[[], None] = lambda: None,
    until: Sequence[int] = (),
    options: ServeOptions | None = None,
    folder: Path | None = None,
) -> int:
    """Open the data, bind `endpoint`, call `ready`, and serve until one of the descriptors `until` becomes readable,
    which is returned, or a signal's handler raises. To be called in the main thread. A standby calls `standing_by`
    where it has to wait for another loader's end. folder: the private one of this loader; by default it makes one.

    Raises what `Feed` raises for unfit data, OSError for an endpoint that can not be bound or a ledger that can not be
    written, ValueError for an endpoint that other machines could reach without keys. Once it serves, only ServingError.
    """
    options = options or ServeOptions()
    for address in filter(None, (endpoint, options.also)):
        check_endpoint(address, keys=options.keys)
    counters = Counters()
    feed = Feed(settings, counters, Cache.default(options.cache, options.cache_bytes))
    feed.deliver(0, Position(feed.start))  # compiles what is not in the cache before a rank waits for it
    with _signals() as signals, contextlib.ExitStack() as stack:
        ended = _take_turn(endpoint, stack, [signals, *until], options, standing_by)
        if ended is not None:
            return ended
        socket = stack.enter_context(listening(endpoint, keys=options.keys, also=options.also))
        handover = stack.enter_context(handing_over(endpoint))
        stack.enter_context(exposing(options.metrics, counters, copies_of(feed)))
        recorder = stack.enter_context(recording(options.ledger, feed))
        stack.enter_context(registered(feed.settings, endpoint, options, folder))
        try:
            service = Service(feed, socket, handover, poison=options.poison, recorder=recorder)
            return service.run(ready=ready, until=[signals, *until])
        except Exception as error:
            log.exception("failed while serving: %r", error)
            raise ServingError(f"the loader failed while serving: {error!r}") from error


def copies_of(feed: Feed) -> Callable[[], StoreCounters] | None:
    """Tells what was fetched so far; None where the data are read in their place."""
    arrivals = feed.shards.arrivals
    return None if arrivals is None else lambda: arrivals.store.counters


def _take_turn(
    endpoint: str,
    stack: contextlib.ExitStack,
    until: Sequence[int],
    options: ServeOptions,
    standing_by: Callable[[], None],
) -> int | None:
    """Claim the endpoint, or wait for it; the descriptor that became readable meanwhile, if one did. Raises OSError
    where another loader has it and this one is no standby."""
    if (claim := claim_of(endpoint)) is None:
        if options.standby:
            raise ValueError(f"endpoint is {endpoint!r}: a standby needs ipc://PATH, where it sees the other end")
        return None
    waiting = False
    while True:
        with contextlib.suppress(filelock.Timeout):
            stack.enter_context(claim.acquire(blocking=False))
            return None
        if not options.standby:
            raise OSError(f"{endpoint} can not be bound: another process listens there")
        if not waiting:
            waiting = True
            standing_by()
        if (ended := first_readable(*until, seconds=TURN_SECONDS)) is not None:
            return ended


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


def _say(word: bytes) -> None:
    os.write(sys.stdout.fileno(), word)


def _carry_out(order: Order, orders: BinaryIO) -> None:
    """Serve until another line comes, or the owner is gone. Raises what `serve` raises."""
    try:
        owner = os.pidfd_open(order.owner)
    except ProcessLookupError:
        shutil.rmtree(order.folder, ignore_errors=True)
        return
    try:
        ended = serve(
            order.settings,
            order.endpoint,
            ready=lambda: _say(READY),
            standing_by=lambda: _say(STANDBY),
            until=[owner, orders.fileno()],
            options=order.options,
            folder=Path(order.folder) if order.folder else None,
        )
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
    if first_readable(owner, seconds=GOING_SECONDS) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Carry out one order from standard input; returns the exit code."""
    log_json()
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
    except Exception as error:
        log.exception("failed at start: %r", error)
        return FAILED
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
