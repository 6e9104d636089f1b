"""A process that would not exit: messages that nobody takes kept it, and its exit code did not say what ended it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqmesh.loader.client import Client
from seqmesh.loader.endpoint import claim_of
from seqmesh.loader.keys import create_keys
from seqmesh.loader.order import Order, ServeOptions
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.wire import Bye, Heartbeat
from tests.serving import (
    SECONDS,
    connection,
    free_port,
    is_running,
    say_hello,
    server_process,
    wait_for,
    wait_until,
)
from tests.support import make_set, settings_for

EXIT_SECONDS = 5


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), [10] * 20), tokens_per_step=10, capacity=10).resolved()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/loader"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    create_keys(folder)
    return folder


@pytest.fixture
def remote(settings: LoaderSettings, keys: Path) -> Order:
    """Of a loader for other machines."""
    options = ServeOptions(keys=str(keys))
    return Order(settings=settings, endpoint=f"tcp://0.0.0.0:{free_port()}", owner=os.getpid(), options=options)


def until_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize(
    ("remotely", "number", "code"),
    [(False, signal.SIGTERM, 143), (False, signal.SIGINT, 130), (True, signal.SIGINT, 130)],
)
def test_a_signal_ends_a_loader_whose_ranks_never_came(
    settings: LoaderSettings, endpoint: str, remote: Order, remotely: bool, number: signal.Signals, code: int
) -> None:
    order = remote if remotely else Order(settings=settings, endpoint=endpoint, owner=os.getpid())
    with server_process(order) as process:
        until_ready(process)
        process.send_signal(number)
        assert process.wait(EXIT_SECONDS) == code
        assert process.stderr is not None
        assert "ended with 0 ranks, 0 messages refused" in process.stderr.read()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (None, 0)])
def test_a_loader_that_stands_by_ends_like_one_that_serves(
    settings: LoaderSettings, endpoint: str, number: signal.Signals | None, code: int
) -> None:
    options = ServeOptions(standby=True)
    claim = claim_of(endpoint)
    assert claim is not None
    with (
        claim,
        server_process(Order(settings=settings, endpoint=endpoint, owner=os.getpid(), options=options)) as process,
    ):
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "standby\n"
        if number:
            process.send_signal(number)
        else:
            process.stdin.close()
        assert process.wait(EXIT_SECONDS) == code


@pytest.mark.parametrize("word", ["stop\n", ""])
def test_its_owner_can_tell_it_to_stop(settings: LoaderSettings, endpoint: str, word: str) -> None:
    with server_process(Order(settings=settings, endpoint=endpoint, owner=os.getpid())) as process:
        until_ready(process)
        assert process.stdin is not None
        process.stdin.write(word)
        process.stdin.close()  # the end of its input is word enough
        assert process.wait(EXIT_SECONDS) == 0


def test_it_ends_with_its_owner_and_clears_up(settings: LoaderSettings, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    with subprocess.Popen(["sleep", "600"]) as owner:
        order = Order(settings=settings, endpoint=f"ipc://{folder}/loader", owner=owner.pid, folder=str(folder))
        with server_process(order) as process:
            until_ready(process)
            owner.kill()
            assert process.wait(EXIT_SECONDS) == 0
    assert not folder.exists()
    with server_process(order) as process:  # its owner is gone before it starts
        assert process.wait(SECONDS) == 0


def test_a_signal_to_all_of_a_job_leaves_nothing_behind(settings: LoaderSettings, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    with subprocess.Popen(["sleep", "600"]) as owner:
        order = Order(settings=settings, endpoint=f"ipc://{folder}/loader", owner=owner.pid, folder=str(folder))
        with server_process(order) as process:
            until_ready(process)
            process.terminate()
            owner.terminate()
            assert process.wait(EXIT_SECONDS) == 143
    assert not folder.exists()


def test_unfit_data_is_another_code(endpoint: str, tmp_path: Path) -> None:
    nowhere = settings_for(tmp_path / "nowhere")
    with server_process(Order(settings=nowhere, endpoint=endpoint, owner=os.getpid())) as process:
        assert process.wait(SECONDS) == 2
        assert process.stderr is not None
        assert "is not a finished shard set" in process.stderr.read().splitlines()[-1]


@pytest.mark.parametrize("remotely", [False, True])
def test_what_nobody_foresaw_is_another_code_and_leaves_its_traceback(
    settings: LoaderSettings, endpoint: str, remote: Order, keys: Path, remotely: bool
) -> None:
    order = remote if remotely else Order(settings=settings, endpoint=endpoint, owner=os.getpid())
    code = (
        "from seqmesh.loader.service import Service\n"
        "def broken(*_):\n    raise RuntimeError('broken on purpose')\n"
        "Service._welcome = broken"
    )
    with server_process(order, code=code) as process:
        until_ready(process)
        address = order.endpoint.replace("0.0.0.0", "127.0.0.1")
        with connection(address, keys=keys if remotely else None) as socket:
            say_hello(socket)
            assert process.wait(EXIT_SECONDS) == 3
        assert process.stderr is not None
        words = json.loads(process.stderr.read().splitlines()[-1])
    assert words["message"] == "failed while serving: RuntimeError('broken on purpose')"
    assert words["traceback"].splitlines()[-1] == "RuntimeError: broken on purpose"


def test_batches_that_were_under_way_are_counted_in_the_log(settings: LoaderSettings, endpoint: str) -> None:
    with server_process(Order(settings=settings, endpoint=endpoint, owner=os.getpid())) as process:
        with connection(endpoint) as socket:
            say_hello(socket, credit=5000)
            sent = wait_for(socket, Heartbeat).sequence
            assert sent >= 2
            process.terminate()
            assert process.wait(EXIT_SECONDS) == 143
        assert process.stderr is not None
        assert f"rank 0: {sent} batches sent, {sent} not acknowledged" in process.stderr.read()


# A training script that never comes to an orderly `close`.
OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it, which is inherited
from seqmesh.loader import Loader, LoaderSettings
standby = sys.argv[4] == "two"
loader = Loader(LoaderSettings.from_json(sys.argv[1]), rank=0, credit_bytes=500, standby=standby)
print(*(child.pid for child in loader._process._children), flush=True)
if sys.argv[2] == "reads":
    next(iter(loader))
if sys.argv[3] == "fails":
    raise RuntimeError("in user code")
if sys.argv[3] == "waits":
    import time
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("reads", "end", "loaders", "number", "code"),
    [
        ("does not read", "fails", "one", None, 1),
        ("reads", "ends", "one", None, 0),
        ("does not read", "waits", "one", signal.SIGINT, -signal.SIGINT),
        ("reads", "waits", "one", signal.SIGKILL, -signal.SIGKILL),
        ("reads", "waits", "two", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_an_owner_that_ends_without_closing_takes_its_loader_with_it(
    settings: LoaderSettings,
    tmp_path: Path,
    reads: str,
    end: str,
    loaders: str,
    number: signal.Signals | None,
    code: int,
) -> None:
    command = [sys.executable, "-c", OWNER, settings.to_json().decode(), reads, end, loaders]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        if number:
            owner.send_signal(number)
        try:
            assert owner.wait(SECONDS) == code
        finally:
            owner.kill()
        wait_until(lambda: not any(map(is_running, pids)) and not list(tmp_path.iterdir()), EXIT_SECONDS)
        owner.stdout.close()


def test_leaving_a_loader_that_never_was_does_not_hang(endpoint: str) -> None:
    """With ZeroMQ's own defaults this waits for ever."""
    code = (
        "import sys\nfrom seqmesh.loader.client import Client\n"
        "from seqmesh.loader.errors import LoaderTimeoutError\n"
        "client = Client(sys.argv[1], rank=0, credit=1, timeout=0.2)\n"
        "try:\n    client.welcome()\nexcept LoaderTimeoutError:\n    client.close()"
    )
    subprocess.run([sys.executable, "-c", code, endpoint], check=True, timeout=SECONDS)


def test_a_full_queue_does_not_stop_a_rank_from_leaving(endpoint: str) -> None:
    client = Client(endpoint, rank=0, credit=1, timeout=1)
    begin = time.monotonic()
    for _ in range(3000):  # ZeroMQ queues 1,000 for a peer that is not there
        client._send(Bye(session=0, sequence=0, held=[]))
    client.close()
    assert time.monotonic() - begin < SECONDS
