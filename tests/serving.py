"""What tests of a live loader share: real loader and rank processes, bare connections, waiting, memory."""

import contextlib
import json
import os
import socket as network
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import zmq

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.client import Client
from seqmesh.loader.endpoint import listening
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.handover import handing_over
from seqmesh.loader.keys import prove_rank
from seqmesh.loader.order import Order
from seqmesh.loader.service import Service
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.stream import StreamState
from seqmesh.loader.wire import Batch, Hello, Message, decode, encode, layout_of
from tests.support import walk

SILENCE_SECONDS = 1.5  # shorter than the default, not to wait long
SECONDS = 20.0  # within which everything must have happened, also on a busy machine

# A rank in a process of its own: reads as many batches as each line of its input says, and a line for each of them.
# At the end of its input it leaves as it should.
RANK = """
import json, sys
from pathlib import Path
from seqmesh.loader import client
from seqmesh.loader.batch import batch_digest
from seqmesh.loader.feed import Position
from seqmesh.loader.stream import StreamState
endpoint, rank, peer, peers, keeps, credit, state, wave, client.SILENCE_SECONDS, keys = json.loads(sys.argv[1])
place = {"rank": rank, "peer": peer, "peers": peers}
client = client.Client(endpoint, **place, credit=credit, timeout=20, keys=Path(keys) if keys else None)
kept = []
client.subscribe(Position(StreamState.from_dict(state), wave))
for line in sys.stdin:
    for _ in range(int(line)):
        delivery = client.next()
        after = delivery.next_position
        print(json.dumps([batch_digest(delivery.batch), after.state.to_dict(), after.wave]), flush=True)
        if keeps:
            kept.append(delivery)
        del delivery
client.close()
"""


class RankProcess:
    """A rank that reads when it is told to, and that can be stopped or killed. keeps: it lets go of no batch.
    `position`: after its last batch. prefix: of its command. code: run before, in the same process."""

    def __init__(
        self,
        endpoint: str,
        rank: int,
        position: Position,
        *,
        peer: int = 0,
        peers: int = 1,
        keeps: bool = False,
        credit: int = 1 << 20,
        keys: Path | None = None,
        prefix: Sequence[str] = (),
        code: str = "",
    ) -> None:
        self.position = position
        fields = [endpoint, rank, peer, peers, keeps, credit, position.state.to_dict(), position.wave]
        argument = json.dumps([*fields, SILENCE_SECONDS, None if keys is None else str(keys)])
        command = [*prefix, sys.executable, "-c", f"{code}\n{RANK}", argument]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def take(self, count: int) -> list[str]:
        """Digests of the next batches."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        digests = []
        for _ in range(count):
            digest, state, wave = json.loads(self.process.stdout.readline())
            digests.append(digest)
            self.position = Position(StreamState.from_dict(state), wave)
        return digests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its pipes
            self.process.kill()


@contextlib.contextmanager
def server_process(order: Order, *, code: str = "", prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """The loader's own command, serving; its log in `stderr`. code: run before, in the same process. prefix: of its
    command."""
    command = f"{code}\nimport sys\nfrom seqmesh.loader.server import main\nsys.exit(main())"
    arguments = ["-c", command] if code else ["-m", "seqmesh.loader.server"]
    pipe = subprocess.PIPE
    command_line = [*prefix, sys.executable, *arguments]
    with subprocess.Popen(command_line, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdin
            process.stdin.write(order.to_json() + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def served_here(settings: LoaderSettings, endpoint: str, *, keys: Path | None = None) -> Iterator[Service]:
    """A loader in a thread of this process, which can be looked into; recycled slots are poisoned."""
    stop, ready = os.eventfd(0), threading.Event()
    codes: list[int] = []
    with (
        listening(endpoint, keys=None if keys is None else str(keys)) as socket,
        handing_over(endpoint) as handover,
    ):
        service = Service(Feed(settings), socket, handover, poison=True)
        thread = threading.Thread(target=lambda: codes.append(service.run(ready=ready.set, until=[stop])))
        thread.start()
        try:
            assert ready.wait(SECONDS)
            yield service
        finally:
            os.eventfd_write(stop, 1)
            thread.join()
            os.close(stop)
        assert codes == [stop], "the service failed"


def free_port() -> int:
    """A port of this machine that nobody listened at just now."""
    with network.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def connection(endpoint: str, *, keys: Path | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket to a loader, for what a client would never send."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if keys is not None:
            prove_rank(socket, keys)
        socket.connect(endpoint)
        yield socket


def hello(**changes: Any) -> Hello:
    """A first hello of rank 0, without credit, that wants frames."""
    fields: dict[str, Any] = {"client": "x", "rank": 0, "peer": 0, "peers": 1, "session": 1, "sequence": 0, "held": []}
    return Hello(**fields | {"credit": 0, "state": None, "wave": 0, "transport": "zmq"} | changes)


def say_hello(socket: zmq.Socket[bytes], **changes: Any) -> None:
    socket.send_multipart(encode(hello(**changes)))


def take_batches(socket: zmq.Socket[bytes], milliseconds: int = 300) -> list[int]:
    """Sizes of the batches that come until none has come for a while."""
    sizes = []
    while socket.poll(milliseconds):
        message = decode(socket.recv_multipart()[0])
        if isinstance(message, Batch):
            sizes.append(layout_of(message)[1])
    return sizes


def wait_for(socket: zmq.Socket[bytes], wanted: type[Message], *, seconds: float = SECONDS) -> Any:
    """The next message of a type; others are passed over."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        assert left > 0 and socket.poll(int(left * 1000) + 1), f"no {wanted.__name__} came in {seconds} s"
        message = decode(socket.recv_multipart()[0])
        if isinstance(message, wanted):
            return message


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process exists that is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def digests_inline(settings: LoaderSettings, rank: int) -> list[str]:
    """Digests of all batches of a rank, read in this process."""
    return [batch_digest(batch) for _, batch in walk(Feed(settings), rank)]


def take(client: Client, count: int | None = None) -> list[str]:
    """Digests of a client's next batches, by default of all that are left."""
    digests: list[str] = []
    while count is None or len(digests) < count:
        if (delivery := client.next()) is None:
            break
        digests.append(batch_digest(delivery.batch))
        del delivery  # its credit comes back when nothing uses it
    return digests


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def batch_bytes(settings: LoaderSettings) -> int:
    """What the first batch of rank 0 costs in credit."""
    feed = Feed(settings)
    draft = feed.draft(0, Position(feed.start))
    assert draft is not None
    return draft.nbytes
