"""The loader process's log: one JSON object a line, whatever happens."""

import json
import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from seqmesh.loader.logs import JsonFormatter, message_of
from seqmesh.loader.order import Order
from seqmesh.loader.settings import LoaderSettings
from seqmesh.loader.wire import Ack, Error, Unknown, encode
from tests.serving import SECONDS, connection, say_hello, server_process, wait_for
from tests.support import make_set, settings_for


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LoaderSettings:
    return settings_for(make_set(tmp_path_factory.mktemp("set"), [10] * 20), tokens_per_step=10, capacity=10).resolved()


def parse(text: str, *, pid: int) -> list[dict[str, Any]]:
    """The lines of a process's log, all of which must be of the same form."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert set(line) - {"traceback"} == {"time", "level", "logger", "pid", "message"}
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        assert line["pid"] == pid
    return lines


def test_every_line_of_a_loader_is_one_json_object(settings: LoaderSettings, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/loader"
    code = "import logging, warnings\nimport seqmesh.loader.server as s\nready = s._say\n"
    code += "def say(word):\n    warnings.warn('of a\\nlibrary', stacklevel=1)\n    ready(word)\ns._say = say"
    with server_process(Order(settings=settings, endpoint=endpoint, owner=os.getpid()), code=code) as process:
        with connection(endpoint) as socket:
            say_hello(socket, credit=100)
            socket.send(b"\x80\x04cposix\nsystem\n")
            wait_for(socket, Error)
            socket.send_multipart(encode(Ack(session=1, sequence=0, held=[])))
            wait_for(socket, Unknown)  # it is done with the rank
            process.terminate()
            assert process.wait(SECONDS) == 143
        assert process.stderr
        lines = parse(process.stderr.read(), pid=process.pid)
    words = [(line["level"], line["logger"], line["message"]) for line in lines]
    assert [word[:2] for word in words] == [
        ("warning", "py.warnings"),
        ("warning", "seqmesh.loader"),
        ("error", "seqmesh.loader"),
        ("info", "seqmesh.loader"),
    ]
    assert "of a\nlibrary" in words[0][2]
    assert words[1][2].startswith("refused a message: ")
    assert words[2][2].startswith("rank 0: sent a message that was refused: ")
    assert words[3][2] == "ended with 0 ranks, 1 messages refused"


def test_a_failure_at_start_that_nobody_foresaw_is_logged_like_all_else(
    settings: LoaderSettings, tmp_path: Path
) -> None:
    code = "import seqmesh.loader.server as s\ndef broken(*_):\n    raise RuntimeError('on purpose')\ns.Feed = broken"
    order = Order(settings=settings, endpoint=f"ipc://{tmp_path}/loader", owner=os.getpid())
    with server_process(order, code=code) as process:
        assert process.wait(SECONDS) == 3
        assert process.stderr
        (line,) = parse(process.stderr.read(), pid=process.pid)
    assert line["message"] == "failed at start: RuntimeError('on purpose')"
    assert line["traceback"].splitlines()[-1] == "RuntimeError: on purpose"


def test_the_message_of_a_line_is_what_was_said() -> None:
    words = 'two\nlines of "words", 50 % ü\u2028'
    record = logging.makeLogRecord({"name": "x", "levelno": logging.ERROR, "levelname": "ERROR", "msg": words})
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert message_of(line) == words
    for other in ("Bus error", "[1, 2]", '{"level": "info"}', '"text"', ""):
        assert message_of(other) == other
