"""A long run of a real loader process: memory and descriptors stay where they are, streams go on exactly.

    python -m tests.soak [--batches 1000000] [--reconnects 1000] [--kills 100]

Small batches without end to two rank processes; a rank that leaves and comes back; a loader that is killed again and
again. tests/loader/test_soak.py does a little of each.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import StreamState
from seqmesh.loader.wire import Transport
from tests.serving import SECONDS, resident_bytes, take, wait_until
from tests.support import long_tail, make_set, settings_for

RANKS = 2
SAMPLES = 20  # of memory and descriptors, in a run
GROWTH = 8 << 20  # bytes of memory that a process may grow by after the first quarter of a run
CREDIT = 1 << 16

# Reads so many batches; after every so many it tells where it was and what it got there.
RANK = """
import json, sys
from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.feed import Position
from seqmesh.loader.stream import StreamState
endpoint, rank, credit, state, batches, every = json.loads(sys.argv[1])
position = Position(StreamState.from_dict(state))
client = Client(endpoint, rank=rank, credit=credit, timeout=60)
client.subscribe(position)
for number in range(1, batches + 1):
    delivery = client.next()
    if number % every == 0:
        print(json.dumps([position.state.to_dict(), position.wave, batch_digest(delivery.batch)]), flush=True)
    position = delivery.next_position
    del delivery
client.close()
sys.stdin.readline()
"""


@dataclass(frozen=True, slots=True)
class Use:
    """Of a process at one time. memory: resident bytes. files: open descriptors."""

    memory: int
    files: int


def use_of(pid: int) -> Use:
    return Use(resident_bytes(pid), len(os.listdir(f"/proc/{pid}/fd")))


def small_batches(folder: Path) -> LoaderSettings:
    """Two ranks with a document or two in each batch, a hundred batches in a step, without end."""
    data = make_set(folder, long_tail(5000, 16), shard_tokens=20_000)
    return settings_for(data, tokens_per_step=1600 * RANKS, capacity=16, ranks=RANKS, epochs=None).resolved()


@contextmanager
def reading(endpoint: str, rank: int, start: StreamState, batches: int, every: int) -> Iterator[subprocess.Popen[str]]:
    argument = json.dumps([endpoint, rank, CREDIT, start.to_dict(), batches, every])
    command = [sys.executable, "-c", RANK, argument]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run_batches(settings: LoaderSettings, batches: int) -> list[list[Use]]:
    """Read so many batches in all, some of which are compared with those read here; samples of what the loader and the
    ranks used."""
    feed, each = Feed(settings), batches // RANKS
    uses: list[list[Use]] = []
    with LoaderProcess(settings) as process, ExitStack() as stack:
        readers = [
            stack.enter_context(reading(process.endpoint, rank, feed.start, each, each // SAMPLES))
            for rank in range(RANKS)
        ]
        for _ in range(SAMPLES):
            for rank, reader in enumerate(readers):
                assert reader.stdout
                state, wave, digest = json.loads(reader.stdout.readline())
                expected = feed.deliver(rank, Position(StreamState.from_dict(state), wave))
                assert expected is not None
                assert batch_digest(expected.batch) == digest
            uses.append([use_of(pid) for pid in (process.pid, *(reader.pid for reader in readers))])
    return uses


def check_flat(uses: list[list[Use]]) -> None:
    """No process grew after the first quarter, nor holds a descriptor more. The ranks' last sample is of their end."""
    for samples in zip(*uses[SAMPLES // 4 : -1], strict=True):
        growth = samples[-1].memory - samples[0].memory
        assert growth < GROWTH, f"grew by {growth} bytes: {samples}"
        assert samples[-1].files <= samples[0].files, f"left descriptors open: {samples}"


def run_reconnects(settings: LoaderSettings, reconnects: int, *, seed: int = 0) -> None:
    """A rank that leaves, in good order or not, and comes back where it was, each time after a few batches. Not in good
    order only with frames: what lies in a ring is kept for a process that lives."""
    random_numbers, feed = random.Random(seed), Feed(settings)
    position = expected = Position(feed.start)
    with LoaderProcess(settings) as process:
        before: Use | None = None
        for number in range(reconnects):
            transport: Transport = "shm" if random_numbers.randrange(2) else "zmq"
            client = Client(process.endpoint, rank=0, credit=CREDIT, timeout=SECONDS, transport=transport)
            client.subscribe(position)
            for _ in range(random_numbers.randrange(1, 10)):
                delivery, wanted = client.next(), feed.deliver(0, expected)
                assert delivery is not None and wanted is not None
                assert batch_digest(delivery.batch) == batch_digest(wanted.batch)
                position, expected = delivery.next_position, wanted.next_position
                del delivery
            if transport == "zmq":
                client._send = ignore  # type: ignore[method-assign, assignment]  # as if killed: it says no bye
            client.close()
            if number == reconnects // 2:
                before = use_of(process.pid)
        assert before is not None
        wait_until(lambda: use_of(process.pid).files <= before.files)  # connections end by and by
        after = use_of(process.pid)
        assert after.memory - before.memory < GROWTH, f"grew from {before} to {after}"


def ignore(_: object) -> None:
    pass


def run_kills(settings: LoaderSettings, kills: int, *, seed: int = 0) -> list[float]:
    """Kill the loader so many times at random moments while both ranks read; seconds until both had more."""
    before = len(os.listdir("/proc/self/fd"))
    seconds = _run_kills(settings, kills, random.Random(seed))
    assert len(os.listdir("/proc/self/fd")) <= before, "left descriptors open"
    return seconds


def _run_kills(settings: LoaderSettings, kills: int, random_numbers: random.Random) -> list[float]:
    feed, seconds = Feed(settings), list[float]()
    with LoaderProcess(settings, restarts=kills) as process, ExitStack() as stack:
        clients = [
            Client(process.endpoint, rank=rank, credit=1, timeout=SECONDS, alive=process.check) for rank in range(RANKS)
        ]
        positions = [Position(feed.start)] * RANKS
        for client in clients:
            stack.callback(client.close)
            client.subscribe(Position(feed.start))
        for _ in range(kills):
            for _ in range(random_numbers.randrange(1, 50)):
                read_together(feed, clients, positions)
            begin, killed = time.monotonic(), process.pid
            os.kill(killed, signal.SIGKILL)
            for _ in range(2):  # one may have been under way
                read_together(feed, clients, positions)
            seconds.append(time.monotonic() - begin)
            wait_until(lambda killed=killed: process.pid != killed)  # type: ignore[misc]
    return seconds


def read_together(feed: Feed, clients: list[Client], positions: list[Position]) -> None:
    """One batch for each rank, compared with the one read here."""
    for rank, client in enumerate(clients):
        expected = feed.deliver(rank, positions[rank])
        assert expected is not None
        assert take(client, 1) == [batch_digest(expected.batch)]
        positions[rank] = expected.next_position


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--reconnects", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    logging.getLogger("seqmesh.loader").setLevel(logging.ERROR)  # or it tells of every restart
    with tempfile.TemporaryDirectory() as folder:
        settings = small_batches(Path(folder))
        begin = time.monotonic()
        uses = run_batches(settings, options.batches)
        took = time.monotonic() - begin
        print(f"{options.batches} batches in {took:.0f} s, {options.batches / took:.0f} a second", flush=True)
        for name, *two in zip(("loader", "rank 0", "rank 1"), uses[SAMPLES // 4], uses[-2], strict=True):
            words = ", then ".join(f"{use.memory >> 10} KiB and {use.files} descriptors" for use in two)
            print(f"  {name}: {words}")
        check_flat(uses)
        begin = time.monotonic()
        run_reconnects(settings, options.reconnects)
        print(f"{options.reconnects} reconnects in {time.monotonic() - begin:.0f} s", flush=True)
        seconds = sorted(run_kills(settings, options.kills))
        print(
            f"{options.kills} kills: {seconds[len(seconds) // 2]:.2f} s to the next batch, {seconds[-1]:.2f} s at most"
        )


if __name__ == "__main__":
    main()
