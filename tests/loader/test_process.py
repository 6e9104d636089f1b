"""A real loader process, real sockets: served batches, faults, and what is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from seqmesh.loader.batch import batch_digest
from seqmesh.loader.child import Child
from seqmesh.loader.client import Client
from seqmesh.loader.embedded import Loader
from seqmesh.loader.errors import LoaderError, LoaderTimeoutError
from seqmesh.loader.feed import Feed, Position
from seqmesh.loader.order import Order
from seqmesh.loader.process import LoaderProcess
from seqmesh.loader.reader import MAX_UNDER_WAY
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.wire import Ack, End, encode
from tests.serving import digests_inline, hello, is_running, take, take_batches, wait_until
from tests.support import long_tail, make_set, settings_for, walk

CREDIT = 1 << 20


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), long_tail(200, 40)), ranks=2, capacity=48)


@pytest.fixture(scope="module")
def process(settings: LoaderSettings) -> Iterator[LoaderProcess]:
    with LoaderProcess(settings) as process:
        yield process


def client_of(process: LoaderProcess, rank: int, *, credit: int = CREDIT) -> Client:
    return Client(process.endpoint, rank=rank, credit=credit, timeout=10, alive=process.check)


def digests_from(client: Client, position: Position) -> list[str]:
    client.subscribe(position)
    return take(client)


def test_a_process_serves_what_this_process_would_read(settings: LoaderSettings, process: LoaderProcess) -> None:
    feed = Feed(settings)
    for rank in range(2):
        client = client_of(process, rank)
        assert digests_from(client, Position(feed.start)) == digests_inline(settings, rank)
        client.close()


def test_ranks_are_served_side_by_side(settings: LoaderSettings, process: LoaderProcess) -> None:
    feed = Feed(settings)
    clients = [client_of(process, rank) for rank in range(2)]
    served: list[list[str]] = [[], []]
    for client in clients:
        client.subscribe(Position(feed.start))
    for _ in range(10):
        for rank, client in enumerate(clients):
            delivery = client.next()
            assert delivery is not None
            served[rank].append(batch_digest(delivery.batch))
    for rank, client in enumerate(clients):
        client.close()
        assert served[rank] == digests_inline(settings, rank)[:10]


def test_any_position_can_be_asked_for(settings: LoaderSettings, process: LoaderProcess) -> None:
    walked = list(walk(Feed(settings), 1))
    every = digests_inline(settings, 1)
    client = client_of(process, 1)
    for number in (0, 3, 4, len(walked) - 2):
        assert digests_from(client, walked[number][0]) == every[number + 1 :]
    client.close()


def test_a_rank_that_comes_back_replaces_the_one_that_was(settings: LoaderSettings, process: LoaderProcess) -> None:
    every = digests_inline(settings, 0)
    first = client_of(process, 0)
    first.subscribe(Position(Feed(settings).start))
    for _ in range(3):
        delivery = first.next()
    assert delivery is not None
    second = client_of(process, 0)  # the first was killed, say: it never said bye
    assert digests_from(second, delivery.next_position) == every[3:]
    first.close()
    second.close()


def test_a_batch_larger_than_all_the_credit_still_passes(settings: LoaderSettings, process: LoaderProcess) -> None:
    client = client_of(process, 0, credit=10)
    assert digests_from(client, Position(Feed(settings).start)) == digests_inline(settings, 0)
    client.close()


def test_no_more_is_sent_than_the_credit_allows(process: LoaderProcess) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(process.endpoint)
        limit = 3000
        socket.send_multipart(encode(hello(credit=limit)))
        first = take_batches(socket)
        assert len(first) >= 2
        assert sum(first) <= limit
        socket.send_multipart(encode(Ack(session=1, sequence=1, held=[])))
        more = take_batches(socket)
        assert 1 <= len(more) <= 3
        assert sum(first[1:] + more) <= limit


def test_small_batches_are_not_read_ahead_without_end(tmp_path: Path) -> None:
    """The credit alone would allow thousands, and the other rank would wait for all of them."""
    data = make_set(tmp_path, [4] * 5000, shard_tokens=100_000)
    with (
        LoaderProcess(settings_for(data, tokens_per_step=8, capacity=8, ranks=2)) as process,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(process.endpoint)
        socket.send_multipart(encode(hello(credit=64 << 20)))
        assert len(take_batches(socket)) == MAX_UNDER_WAY
        socket.send_multipart(encode(Ack(session=1, sequence=1, held=[])))
        assert len(take_batches(socket)) == 1


def test_a_stalled_rank_does_not_keep_the_other_waiting(settings: LoaderSettings, process: LoaderProcess) -> None:
    stalled = client_of(process, 1, credit=500)
    stalled.subscribe(Position(Feed(settings).start))
    client = client_of(process, 0)
    assert digests_from(client, Position(Feed(settings).start)) == digests_inline(settings, 0)
    client.close()
    stalled.close()


def test_garbage_is_refused_and_nobody_else_notices(settings: LoaderSettings, process: LoaderProcess) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(process.endpoint)
        for frames in ([b"\x80\x04cposix\nsystem\n"], [b"\xdf\xff\xff\xff\xff"], [b""], [b"a", b"b"], [b"x" * 100_000]):
            socket.send_multipart(frames)
        socket.send_multipart(encode(End(session=1, sequence=0)))
        assert not socket.poll(300)
    client = client_of(process, 0)
    assert digests_from(client, Position(Feed(settings).start)) == digests_inline(settings, 0)
    client.close()
    assert "refused a message: not a message, or a damaged one: its checksum differs" in process.log.read_text()


def test_a_rank_that_is_not_in_the_job_is_told(process: LoaderProcess) -> None:
    client = client_of(process, 2)
    with pytest.raises(LoaderError, match="rank 2: rank is 2: this loader serves ranks 0 to 1"):
        client.welcome()
    client.close()


def test_the_loader_process_never_imports_torch(process: LoaderProcess) -> None:
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "/numba/" in mapped
    assert "torch" not in mapped


def test_importing_the_server_does_not_import_torch() -> None:
    code = "import sys, seqmesh.loader.server, seqmesh.loader.client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tensors_may_be_kept_and_have_the_types_torch_wants(settings: LoaderSettings, process: LoaderProcess) -> None:
    with Loader(endpoint=process.endpoint, rank=0) as loader:
        assert loader.settings == settings.resolved()
        assert loader.vocab_size == 1000
        kept = list(loader)
        assert loader.wait_seconds > 0
    assert [batch_digest(b) for b in kept] == digests_inline(settings, 0)
    names = ("input_ids", "labels", "position_ids", "cu_seqlens")
    assert [str(getattr(kept[0], n).dtype) for n in names] == [
        "torch.int64",
        "torch.int64",
        "torch.int32",
        "torch.int32",
    ]


def test_settings_that_the_running_loader_does_not_serve_are_refused(
    settings: LoaderSettings, process: LoaderProcess
) -> None:
    other = settings_for(Path(settings.data), ranks=2, capacity=49)
    with pytest.raises(ValueError, match="serves other settings"):
        Loader(other, endpoint=process.endpoint, rank=0)


def test_a_killed_loader_is_reported_at_once_with_its_exit_code(settings: LoaderSettings) -> None:
    with Loader(settings, rank=0, timeout=30, credit_bytes=500, restarts=0) as loader:
        batches = iter(loader)
        next(batches)
        assert loader._process is not None
        os.kill(loader._process.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(LoaderError, match="loader process ended with exit code -9"):
            list(batches)
        assert time.monotonic() - begin < 5


def test_a_loader_that_is_not_there_is_a_timeout_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LoaderTimeoutError, match=rf"rank 3: no answer .* ipc://{tmp_path}/x within 0.5 s"):
        Loader(endpoint=f"ipc://{tmp_path}/x", rank=3, timeout=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credit_bytes": 0}, "credit_bytes is 0: must be at least 1"),
        ({"timeout": -1.0}, "timeout is -1: must be over 0 seconds"),
        ({"peer": 2, "peers": 2}, "peer is 2 of 2"),
        ({"rank": -1}, "rank is -1"),
        ({"transport": "tcp"}, "transport is 'tcp': must be auto, shm or zmq"),
        ({"keys": "nowhere"}, "keys is 'nowhere': has no loader.key"),
    ],
)
def test_unfit_options_are_refused_by_name_and_leave_no_process(
    process: LoaderProcess, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(endpoint=process.endpoint, **{"rank": 0} | options)


def test_a_process_that_was_started_for_unfit_options_is_ended(
    settings: LoaderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="peer is 5 of 2"):
        Loader(settings, rank=0, peer=5, peers=2)
    assert list(tmp_path.iterdir()) == []


def test_unfit_data_is_refused_in_the_loaders_own_words(tmp_path: Path) -> None:
    make_set(tmp_path, [5, 9])
    with pytest.raises(LoaderError, match=r"exit code 2: .*document 1 has 9 tokens, max_document is 8"):
        LoaderProcess(settings_for(tmp_path, capacity=8))
    with pytest.raises(LoaderError, match=r"exit code 2: .*not a finished shard set"):
        LoaderProcess(settings_for(tmp_path / "nowhere"))


def test_nothing_is_left_behind(settings: LoaderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with LoaderProcess(settings) as first, LoaderProcess(settings) as second:
        folders = list(tmp_path.iterdir())
        assert len(folders) == 2
        assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
        pids = [first.pid, second.pid]
    assert list(tmp_path.iterdir()) == []
    assert not any(is_running(pid) for pid in pids)


def test_the_loader_ends_when_its_owner_is_killed(settings: LoaderSettings, tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom seqmesh.loader import LoaderProcess, LoaderSettings\n"
        "process = LoaderProcess(LoaderSettings.from_json(sys.argv[1]))\nprint(process.pid, flush=True)\ntime.sleep(60)"
    )
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    arguments = [sys.executable, "-c", code, settings.to_json().decode()]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert len(list(tmp_path.iterdir())) == 1
        owner.kill()
    wait_until(lambda: not is_running(pid) and not list(tmp_path.iterdir()))


def test_a_socket_path_that_is_too_long_is_refused(
    settings: LoaderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(LoaderError, match="too long for a socket"):
        LoaderProcess(settings)
    assert list(deep.iterdir()) == []


def test_the_end_of_a_process_that_somebody_else_has_seen_is_no_fault(settings: LoaderSettings, tmp_path: Path) -> None:
    """The thread that starts it again must not die of it."""
    order = Order(settings=settings.resolved(), endpoint=f"ipc://{tmp_path}/loader", owner=os.getpid())
    child = Child(order, tmp_path / "log")
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)  # as `poll` does before it notes what it found
    assert child.open_end() is None
    child.end()
